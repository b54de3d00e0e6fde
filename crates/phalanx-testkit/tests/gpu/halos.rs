//! Halos of arrays in GPU memory, against a model of the whole array.

use crate::failures::{self, TIMEOUT, still_works};
use crate::world::{DeviceRepr, Slice, both, done, download, expect, must, new_stream, stream, upload};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, Grid};
use phalanx_testkit::halo::Spread;
use phalanx_testkit::random::Random;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use phalanx_testkit::threads::Busy;
use phalanx_testkit::{Number, Scenario};
use std::sync::Barrier;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("halos/random", |comm, args| random(&comm, args)),
    Scenario::rank("halos/other_stream", |comm, _| other_stream(&comm)),
    Scenario::rank("halos/refused", |comm, _| refused(&comm)),
];

/// Arrays of a random trial.
const ARRAYS: usize = 12;

pub fn trials(gpus: usize) -> Vec<Trial> {
    let [random, others @ ..] = SCENARIOS else { unreachable!("there are several") };
    let mut trials = both(*random, 1, gpus, &["1"]);
    trials.extend(others.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])));
    let of_threads = [("threads/halos/no_wait", no_wait as fn(usize) -> _), ("threads/halos/absent", absent)];
    trials.extend(
        of_threads.map(|(name, trial)| {
            Trial::test(name, move || trial(gpus)).only_if(gpus >= 2, "it takes two GPUs")
        }),
    );
    trials
}

/// Random grids of all ranks, shapes and widths; elements of several sizes.
fn random(comm: &Comm, args: &[String]) -> Outcome {
    let seed: u64 = args[0].parse().context(|| "the seed".into())?;
    let mut random = Random::new(seed);
    for number in 0..ARRAYS {
        let spread = Spread::random(&mut random, comm.world_size());
        match number % 3 {
            0 => exchange::<f64>(comm, &spread)?,
            1 => exchange::<u16>(comm, &spread)?,
            _ => exchange::<u8>(comm, &spread)?,
        }
    }
    done()
}

/// Both forms of the exchange, of a whole array and of a part of a slice.
fn exchange<T: Number + DeviceRepr>(comm: &Comm, spread: &Spread) -> Result<(), String> {
    let (grid, width) = (spread.grid(), spread.width());
    let place = grid.coordinates(comm.rank());
    let shape = spread.shape(&place);
    let [before, expected] = spread.part(&place).map(of_type::<T>);
    let says = |form: &str| format!("{form} of {spread:?} at {place:?}");

    let mut array = upload(comm, &before)?;
    must("exchange_halo", comm.exchange_halo(&grid, &mut array, &shape, &width))?;
    expect(says("exchange_halo"), &download(comm, &array)?, |cell| expected[cell])?;

    // A part that begins at any multiple of the element's size.
    let framed = |cells: &[T]| [&[T::from_small(7); 3], cells, &[T::from_small(7)]].concat();
    let mut slice = upload(comm, &framed(&before))?;
    let mut part = slice.slice_mut(3..3 + before.len());
    must("exchange_halo", comm.exchange_halo(&grid, &mut part, &shape, &width))?;
    let whole = framed(&expected);
    expect(says("exchange_halo of a part"), &download(comm, &slice)?, |cell| whole[cell])?;

    // The array may be gone while its cells are on their way.
    let gone = upload(comm, &before)?;
    let mut halo = must("start", comm.start_exchange_halo(&grid, &gone, &shape, &width))?;
    drop(gone);
    let mut array = upload(comm, &before)?;
    assert!(halo.is_done(), "finishing does not wait");
    must("finish", halo.finish(&mut array))?;
    expect(says("start_exchange_halo"), &download(comm, &array)?, |cell| expected[cell])
}

/// The values in a type: their lowest bits.
fn of_type<T: Number>(cells: Vec<u64>) -> Vec<T> {
    cells.into_iter().map(|cell| T::from_small((cell % 251) as i32)).collect()
}

/// A ring of all ranks, with one cell of halo at each side of three own ones.
fn ring(comm: &Comm) -> Result<Grid, String> {
    must("grid", Grid::new(&[comm.world_size()], &[true]))
}

/// The cells of a rank in a round of the ring, without its halo.
fn own_cells(rank: usize, round: usize) -> [f32; 5] {
    let cell = |number: usize| (100 * round + 10 * rank + number) as f32;
    [-1.0, cell(0), cell(1), cell(2), -1.0]
}

/// With its halo.
fn with_halo(comm: &Comm, round: usize) -> [f32; 5] {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let [_, first, middle, last, _] = own_cells(rank, round);
    let before = own_cells((rank + ranks - 1) % ranks, round)[3];
    let behind = own_cells((rank + 1) % ranks, round)[1];
    [before, first, middle, last, behind]
}

/// Exchanges on streams other than the array's, each between two uses on the array's own.
fn other_stream(comm: &Comm) -> Outcome {
    let grid = ring(comm)?;
    let mut array = upload(comm, &[0.0f32; 5])?;
    for round in 0..6 {
        let on = must("on", comm.on(&new_stream(comm)?))?;
        let cells = own_cells(comm.rank(), round);
        stream(comm).memcpy_htod(&cells, &mut array).context(|| "upload".into())?;
        if round % 2 == 0 {
            must("exchange_halo", on.exchange_halo(&grid, &mut array, &[5], &[1]))?;
        } else {
            let halo = must("start", on.start_exchange_halo(&grid, &array, &[5], &[1]))?;
            must("finish", halo.finish(&mut array))?;
        }
        let got: Vec<f32> = stream(comm).clone_dtoh(&array).context(|| "download".into())?;
        expect(format_args!("round {round}"), &got, |cell| with_halo(comm, round)[cell])?;
    }
    must("sync", comm.sync())?;
    done()
}

/// Wrong arguments are errors of the rank that makes them. Nothing has been enqueued: all ranks exchange afterwards.
fn refused(comm: &Comm) -> Outcome {
    let grid = ring(comm)?;
    let mut array = upload(comm, &own_cells(comm.rank(), 0))?;
    if comm.rank() == 0 {
        refused_here(comm, &grid, &mut array)?;
        expect("untouched", &download(comm, &array)?, |cell| own_cells(0, 0)[cell])?;
    }
    // The array of another kind of memory, or of another length, is no place for what has come.
    let start = |array: &Slice<f32>| must("start", comm.start_exchange_halo(&grid, array, &[5], &[1]));
    let (on_gpu, shorter) = (start(&array)?, start(&array)?);
    says("in host memory", on_gpu.finish(&mut [0.0f32; 5]), "finish the exchange with the array")?;
    says("too short", shorter.finish(&mut upload(comm, &[0.0f32; 4])?), "it needs 5")?;
    must("exchange_halo", comm.exchange_halo(&grid, &mut array, &[5], &[1]))?;
    expect("afterwards", &download(comm, &array)?, |cell| with_halo(comm, 0)[cell])?;
    done()
}

fn refused_here(comm: &Comm, grid: &Grid, array: &mut Slice<f32>) -> Result<(), String> {
    let larger = must("grid", Grid::new(&[comm.world_size() + 1], &[true]))?;
    let cases: [(&Grid, &[usize], &[usize], &str); 5] = [
        (&larger, &[5], &[1], "halo: grid"),
        (grid, &[5, 1], &[1], "halo: shape"),
        (grid, &[5], &[], "halo: width"),
        (grid, &[5], &[2], "3 × width [2]"),
        (grid, &[6], &[1], "it needs 6"),
    ];
    for (grid, shape, width, words) in cases {
        says("exchange", comm.exchange_halo(grid, array, shape, width), words)?;
        says("start", comm.start_exchange_halo(grid, array, shape, width).map(drop), words)?;
    }
    Ok(())
}

fn says(what: &str, result: phalanx::Result<()>, words: &str) -> Result<(), String> {
    match result {
        Err(Error::Usage(error)) if error.to_string().contains(words) => Ok(()),
        other => Err(format!("{what}: {other:?}, expected a usage error with {words:?}")),
    }
}

/// An exchange returns when it is enqueued: also if the neighbors come later. (The first one waits for them, to connect.)
fn no_wait(gpus: usize) -> Result<(), Failed> {
    let returned = Barrier::new(gpus);
    let outcomes = failures::world(gpus, |comm| -> Result<(), String> {
        let grid = ring(&comm)?;
        for round in 0..3 {
            let mut array = upload(&comm, &own_cells(comm.rank(), round))?;
            if round > 0 && comm.rank() > 0 {
                returned.wait();
            }
            if round < 2 {
                must("exchange_halo", comm.exchange_halo(&grid, &mut array, &[5], &[1]))?;
            } else {
                let halo = must("start", comm.start_exchange_halo(&grid, &array, &[5], &[1]))?;
                must("finish", halo.finish(&mut array))?;
            }
            if round > 0 && comm.rank() == 0 {
                returned.wait();
            }
            expect("the array", &download(&comm, &array)?, |cell| with_halo(&comm, round)[cell])?;
        }
        Ok(())
    })?;
    Ok(outcomes.into_iter().collect::<Result<_, _>>()?)
}

/// One rank does not come: its neighbors say which one, and all GPUs work afterwards.
fn absent(gpus: usize) -> Result<(), Failed> {
    let (late, others) = (gpus - 1, Busy::new(gpus - 1));
    let errors = failures::world(gpus, |comm| {
        let grid = ring(&comm).expect("a ring");
        if comm.rank() == late {
            others.wait(TIMEOUT * 2);
            return comm.barrier().err();
        }
        let _busy = others.one();
        let mut array = upload(&comm, &own_cells(comm.rank(), 0)).expect("upload");
        comm.exchange_halo(&grid, &mut array, &[5], &[1]).and_then(|()| comm.sync()).err()
    })?;
    for error in errors {
        let Some(Error::Timeout(timeout)) = error else { return Err(format!("{error:?}").into()) };
        let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
        assert_eq!(missing, [late], "{timeout}");
    }
    Ok((0..gpus).try_for_each(still_works)?)
}
