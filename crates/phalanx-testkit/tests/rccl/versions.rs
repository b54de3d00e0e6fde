//! Older releases of RCCL, emulated: what they lack is made of what they have, or is an error that says so.

use crate::world::{DEADLINE, done, download, expect, must, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("of_version", of_version)];

const RANKS: usize = 3;

pub fn trials() -> Vec<Trial> {
    // Without a configuration and a split; with splitShare; with everything but the newer spelling.
    let versions = ["2.13.4", "2.15.5", "2.18.3", "2.21.5", "2.27.7", "2.30.4"];
    let trial = |version| Trial::test(format!("versions/{version}"), move || run(version));
    versions.into_iter().map(trial).collect()
}

fn run(version: &str) -> Result<(), Failed> {
    // Its folder goes when it is dropped.
    let emulated = Emulated::rccl(version)?;
    let launch = Launch::new("of_version", RANKS).deadline(DEADLINE).arg(version);
    let launch = emulated.launch(launch.env("PHALANX_BACKEND", "rccl"));
    launch.reports().map(drop).map_err(|problems| format!("{version}:{problems}").into())
}

fn of_version(comm: Comm, args: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let rccl = comm.rccl().ok_or("RCCL")?;
    assert_eq!(rccl.version(), args[0]);
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    let send = upload(&comm, &values::<f32>(rank, 1000))?;
    let mut recv = upload(&comm, &vec![7.0f32; 1000])?;
    must("all_reduce", comm.all_reduce(&send, &mut recv, ReduceOp::Sum))?;
    expect("all_reduce", &download(&comm, &recv)?, sum)?;

    let all = upload(&comm, &values::<f32>(rank, 10 * ranks))?;
    let mut transposed = upload(&comm, &vec![7.0f32; 10 * ranks])?;
    must("all_to_all", comm.all_to_all(&all, &mut transposed))?;
    let expected = |index: usize| value(index / 10, rank * 10 + index % 10) as f32;
    expect("all_to_all", &download(&comm, &transposed)?, expected)?;

    let (to, from) = (vec![rank + 1; ranks], (1..=ranks).collect::<Vec<_>>());
    let send = upload(&comm, &vec![rank as f32; (rank + 1) * ranks])?;
    let mut recv = upload(&comm, &vec![7.0f32; from.iter().sum()])?;
    must("all_to_all_v", comm.all_to_all_v(&send, &to, &mut recv, &from))?;
    let expected: Vec<f32> = (0..ranks).flat_map(|rank| vec![rank as f32; rank + 1]).collect();
    expect("all_to_all_v", &download(&comm, &recv)?, |index| expected[index])?;

    let pairs: Vec<usize> = (0..ranks).map(|peer| rank + peer).collect();
    let mut exchanged = upload(&comm, &vec![rank as f32; pairs.iter().sum()])?;
    must("all_to_all_v_in_place", comm.all_to_all_v_in_place(&mut exchanged, &pairs))?;
    let expected: Vec<f32> = (0..ranks).flat_map(|peer| vec![peer as f32; rank + peer]).collect();
    expect("all_to_all_v_in_place", &download(&comm, &exchanged)?, |index| expected[index])?;

    let part = must("split", comm.split(Some(u32::from(rank > 0)), 0))?.ok_or("a part")?;
    let mut buffer = upload(&part, &[1.0f32])?;
    must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    expect("of the part", &download(&part, &buffer)?, |_| part.world_size() as f32)?;
    drop(part);

    let lacks = |version: &str| numbers(&args[0]) < numbers(version);
    let allocated = rccl.alloc::<f32>(10);
    match allocated {
        Err(Error::MissingFunction(error)) if lacks("2.20.5") => {
            assert!(error.to_string().contains(&args[0]), "{error}");
        }
        allocated => drop(must("alloc", allocated)?),
    }
    let (send, bias) = (upload(&comm, &[1.0f32])?, upload(&comm, &[5.0f32])?);
    let mut recv = upload(&comm, &[0.0f32])?;
    match rccl.all_reduce_with_bias(&send, &mut recv, &bias, ReduceOp::Sum) {
        Err(Error::MissingFunction(_)) if lacks("2.22.3") => {}
        done => {
            must("all_reduce_with_bias", done)?;
            expect("with the bias", &download(&comm, &recv)?, |_| ranks as f32 + 5.0)?;
        }
    }
    must("finalize", comm.finalize())?;
    done()
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').filter_map(|number| number.parse().ok()).collect()
}
