//! Checkpoints: saved by some ranks, read by others.

// Blocks are lists of ranges, of which most have one.
#![allow(clippy::single_range_in_vec_init)]

use phalanx::Comm;
use phalanx_train::Error;
use phalanx_train::checkpoint::{Checkpoint, Progress, Saver, State, list};
use phalanx_train::device::Host;
use phalanx_train::optimizer::AdamW;
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// The part of a flat buffer of `len` elements that a rank has if all parts are as long, with padding behind the end.
fn part(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    let part = len.div_ceil(ranks);
    (rank * part).min(len)..((rank + 1) * part).min(len)
}

fn save(comm: &Comm, folder: &Path, step: u64, state: State<'_>) -> phalanx_train::Result<()> {
    let mut saver = Saver::new(comm, folder)?;
    saver.save(step, state)?;
    saver.finish()
}

/// Saves step 1: the tensor "x" of these numbers, of which each rank has a part.
fn save_numbers(folder: &Path, ranks: usize, numbers: &[f64]) {
    let results = phalanx::run(ranks, |comm| {
        let own = part(numbers.len(), comm.rank(), ranks);
        let mut state = State::new();
        state.tensor::<_, f64>(
            "x",
            &[numbers.len()],
            std::slice::from_ref(&own),
            &Host,
            &numbers[own.clone()],
        );
        save(&comm, folder, 1, state)
    });
    results.unwrap().into_iter().for_each(Result::unwrap);
}

fn counted(len: usize) -> Vec<f64> {
    (1..=len).map(|number| number as f64).collect()
}

/// Parameters of two flat buffers, and where they are in them.
const BUCKETS: [&[(&str, Range<usize>)]; 2] = [&[("a", 0..5), ("b", 5..8)], &[("c", 0..7)]];

#[test]
fn padded_buckets_saved_by_4_ranks_are_read_by_2_and_3() {
    let folder = folder();
    phalanx::run(4, |comm| {
        // Moments 1 to 15, and padding that must not get into a file.
        let mut first = 1;
        let buckets = BUCKETS.map(|parameters| {
            let len = parameters.last().unwrap().1.end;
            let mut moments: Vec<f32> = (first..first + len).map(|moment| moment as f32).collect();
            first += len;
            moments.resize(len.next_multiple_of(4), 99.0);
            moments
        });
        let mut state = State::new();
        for (parameters, moments) in BUCKETS.iter().zip(&buckets) {
            let own = moments.len() / 4 * comm.rank()..moments.len() / 4 * (comm.rank() + 1);
            for (name, whole) in *parameters {
                let (start, end) = (whole.start.max(own.start), whole.end.min(own.end));
                if start < end {
                    let range = start - whole.start..end - whole.start;
                    state.tensor::<_, f32>(*name, &[whole.len()], &[range], &Host, &moments[start..end]);
                }
            }
        }
        save(&comm, folder.path(), 5, state).unwrap();
    })
    .unwrap();
    let bytes: u64 = files(folder.path(), 5).iter().map(|file| data_bytes(file)).sum();
    assert_eq!(bytes, 15 * 4, "padding is in no file");
    for ranks in [2, 3] {
        let parts = phalanx::run(ranks, |comm| {
            let checkpoint = Checkpoint::latest_of_all(&comm, folder.path()).unwrap().unwrap();
            let mut moments = Vec::new();
            for (name, len) in [("a", 5), ("b", 3), ("c", 7)] {
                moments.push(checkpoint.read::<f32>(name, &[part(len, comm.rank(), ranks)]).unwrap());
            }
            moments
        });
        let parts = parts.unwrap();
        let whole: Vec<f32> =
            (0..3).flat_map(|tensor| parts.iter().flat_map(move |part| part[tensor].clone())).collect();
        assert_eq!(whole, (1..=15).map(|moment| moment as f32).collect::<Vec<_>>(), "{ranks} ranks");
    }
}

#[test]
fn fifty_seven_elements_on_2_or_4_ranks() {
    for (saving, reading) in [(2, 4), (4, 2), (4, 3), (1, 8), (8, 1)] {
        let folder = folder();
        save_numbers(folder.path(), saving, &counted(57));
        let read: Vec<f64> = phalanx::run(reading, |comm| {
            let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
            checkpoint.read::<f64>("x", &[part(57, comm.rank(), reading)]).unwrap()
        })
        .unwrap()
        .concat();
        assert_eq!(read, counted(57), "saved by {saving}, read by {reading}");
    }
}

fn files(folder: &Path, step: u64) -> Vec<PathBuf> {
    let folder = folder.join(format!("step-{step:09}"));
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    files
}

/// Bytes of the tensors of a file.
fn data_bytes(file: &Path) -> u64 {
    let bytes = std::fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(_, tensor)| tensor.data().len() as u64).sum()
}

fn gradient(step: u64, len: usize) -> Vec<f64> {
    (0..len).map(|element| ((element + 1) as f64 * step as f64 * 0.37).sin()).collect()
}

#[test]
fn sharded_groups_go_on_with_other_numbers_of_ranks_as_on_one() {
    let shapes: [(&str, &[usize]); 3] = [("w", &[30, 20]), ("b", &[57]), ("v", &[13, 7])];
    let optimizer = AdamW::new(0.01);
    let total = 600 + 57 + 91;
    let train = |group: &mut ShardedGroup<Host, f64, f64>, comm: &Comm, steps: Range<u64>| {
        for step in steps {
            let mut flat = gradient(step, total);
            flat.resize(group.layout().len(), 0.0);
            group.reduce_gradient(comm, &&flat[..], Reduction::Mean).unwrap();
            group.step(&optimizer, 1.0).unwrap();
        }
    };
    let new = |comm: &Comm| {
        let layout = FlatLayout::new(&shapes, comm.world_size()).unwrap();
        let initial = vec![0.5; layout.len()];
        ShardedGroup::<_, f64, f64>::new(comm, &Host, layout, &initial, &optimizer).unwrap()
    };
    let expected = phalanx::run(1, |comm| {
        let mut group = new(&comm);
        train(&mut group, &comm, 0..4);
        group.gather(&comm).unwrap()[..total].to_vec()
    });
    let expected = expected.unwrap().remove(0);
    let folder = folder();
    phalanx::run(4, |comm| {
        let mut group = new(&comm);
        train(&mut group, &comm, 0..2);
        let mut state = State::new();
        state.group("all", &group);
        save(&comm, folder.path(), 2, state).unwrap();
    })
    .unwrap();
    for ranks in [1, 2, 3, 8] {
        let results = phalanx::run(ranks, |comm| {
            let mut group = new(&comm);
            Checkpoint::latest(folder.path()).unwrap().unwrap().load_group("all", &mut group).unwrap();
            assert_eq!(group.steps(), 2);
            train(&mut group, &comm, 2..4);
            group.gather(&comm).unwrap()[..total].to_vec()
        });
        for result in results.unwrap() {
            let furthest = result.iter().zip(&expected).map(|(one, other)| (one - other).abs());
            assert!(furthest.fold(0.0, f64::max) <= 1e-12, "{ranks} ranks");
        }
    }
}

/// Columns of a matrix.
fn columns(rows: usize, width: usize, columns: Range<usize>) -> Vec<Range<usize>> {
    (0..rows).map(|row| row * width + columns.start..row * width + columns.end).collect()
}

#[test]
fn columns_saved_by_3_ranks_are_read_as_rows_over_several_chunks() {
    // 9.6 MB: pieces of more than one chunk.
    let (rows, width) = (400, 3000);
    let number = |element: usize| element as f64 * 0.5;
    let folder = folder();
    phalanx::run(3, |comm| {
        let ranges = columns(rows, width, [0..800, 800..1700, 1700..3000][comm.rank()].clone());
        let own: Vec<f64> = ranges.iter().cloned().flatten().map(number).collect();
        let mut state = State::new();
        state.tensor::<_, f64>("m", &[rows, width], &ranges, &Host, &own);
        save(&comm, folder.path(), 1, state).unwrap();
    })
    .unwrap();
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    for rows in [0..1, 17..18, 0..200, 200..400, 399..400] {
        let range = rows.start * width..rows.end * width;
        let read = checkpoint.read::<f64>("m", std::slice::from_ref(&range)).unwrap();
        assert!(read.iter().copied().eq(range.map(number)), "rows {rows:?}");
    }
    // Ranges in any order, also one of nothing.
    let read = checkpoint.read::<f64>("m", &[10..12, 5..5, 3..4]).unwrap();
    assert_eq!(read, [10, 11, 3].map(number));
    checkpoint.verify().unwrap();
}

#[test]
fn one_file_has_all_tensors_in_their_shapes() {
    let folder = folder();
    phalanx::run(3, |comm| {
        let own = columns(2, 6, 2 * comm.rank()..2 * comm.rank() + 2);
        let wide: Vec<f32> = own.iter().cloned().flatten().map(|element| element as f32).collect();
        let narrow = [half::bf16::from_f32(1.5); 3];
        let mut state = State::new();
        state.tensor::<_, f32>("wide", &[2, 6], &own, &Host, &wide);
        state.tensor::<_, half::bf16>("narrow", &[3, 1], std::slice::from_ref(&(0..3)), &Host, &narrow[..]);
        save(&comm, folder.path(), 1, state).unwrap();
    })
    .unwrap();
    let file = folder.path().join("all.safetensors");
    Checkpoint::latest(folder.path()).unwrap().unwrap().consolidate(&file).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (wide, narrow) = (tensors.tensor("wide").unwrap(), tensors.tensor("narrow").unwrap());
    assert_eq!((wide.shape(), wide.dtype()), (&[2, 6][..], safetensors::Dtype::F32));
    let expected: Vec<u8> = (0..12).flat_map(|element| (element as f32).to_le_bytes()).collect();
    assert_eq!(wide.data(), expected);
    assert_eq!((narrow.shape(), narrow.dtype()), (&[3, 1][..], safetensors::Dtype::BF16));
    assert_eq!(narrow.data(), half::bf16::from_f32(1.5).to_le_bytes().repeat(3));
}

#[test]
fn replicas_are_written_once_and_by_different_ranks() {
    let folder = folder();
    phalanx::run(4, |comm| {
        let mut state = State::new();
        let numbers = [1.0f32; 10];
        for name in 0..8 {
            state.tensor::<_, f32>(
                format!("t{name}"),
                &[10],
                std::slice::from_ref(&(0..10)),
                &Host,
                &numbers[..],
            );
        }
        save(&comm, folder.path(), 1, state).unwrap();
    })
    .unwrap();
    let bytes: Vec<u64> = files(folder.path(), 1).iter().map(|file| data_bytes(file)).collect();
    assert_eq!(bytes, [80; 4]);
}

#[test]
fn values_are_those_of_the_rank_that_saved_them() {
    let folder = folder();
    phalanx::run(2, |comm| {
        let mut state = State::new();
        state.value("random", vec![comm.rank() as u8, 255]);
        state.value("sampler", serde_json::json!({"epoch": 3}));
        save(&comm, folder.path(), 1, state).unwrap();
    })
    .unwrap();
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    for rank in 0..2 {
        assert_eq!(checkpoint.value("random", rank), Some(&serde_json::json!([rank, 255])));
    }
    assert_eq!(checkpoint.value("random", 2), None);
    assert_eq!(checkpoint.value("sampler", 7), Some(&serde_json::json!({"epoch": 3})), "all had the same");
    assert_eq!((checkpoint.step(), checkpoint.ranks()), (1, 2));
}

#[test]
fn a_shard_that_was_cut_or_altered_is_refused_by_name() {
    let numbers = counted(57);
    type Alter = fn(&mut Vec<u8>);
    let alter: [(&str, Alter); 3] = [
        ("has", |bytes| bytes.truncate(bytes.len() - 8)),
        ("tensor \"x\"", |bytes| *bytes.last_mut().unwrap() ^= 1),
        ("its header", |bytes| bytes[20] ^= 1),
    ];
    for (expected, alter) in alter {
        let folder = folder();
        save_numbers(folder.path(), 4, &numbers);
        let file = &files(folder.path(), 1)[2];
        let mut bytes = std::fs::read(file).unwrap();
        alter(&mut bytes);
        std::fs::write(file, bytes).unwrap();
        let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
        for error in [
            checkpoint.read::<f64>("x", std::slice::from_ref(&(0..57))).unwrap_err(),
            checkpoint.verify().unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(matches!(error, Error::Checkpoint { .. }), "{text}");
            assert!(text.contains("shard-00002-of-00004.safetensors") && text.contains(expected), "{text}");
            assert!(text.contains("take an earlier checkpoint"), "{text}");
        }
        // What is in the other files can be read.
        assert_eq!(checkpoint.read::<f64>("x", std::slice::from_ref(&(0..15))).unwrap(), counted(15));
    }
}

#[test]
fn what_does_not_fit_together_is_refused_on_all_ranks_and_the_next_save_works() {
    let folder = folder();
    type Blocks = fn(usize) -> (Vec<usize>, Range<usize>, usize);
    let cases: [(&str, Blocks); 5] = [
        ("elements 2..3 of tensor \"x\" are on no rank", |rank| (vec![5], [0..2, 3..5][rank].clone(), 2)),
        ("elements 2..3 of tensor \"x\" are in different blocks", |rank| {
            (vec![5], [0..3, 2..5][rank].clone(), 3)
        }),
        ("is F32 [5] on rank 0 and F32 [6] on rank 1", |rank| (vec![5 + rank], 0..5, 5)),
        ("elements 4..9 of tensor \"x\", which has 5", |rank| {
            (vec![5], [0..4, 4..9][rank].clone(), [4, 5][rank])
        }),
        ("a view of 3 elements for ranges of 2", |rank| (vec![5], [0..3, 3..5][rank].clone(), 3)),
    ];
    phalanx::run(2, |comm| {
        let mut saver = Saver::new(&comm, folder.path()).unwrap();
        let numbers = [0.0f32; 8];
        for (expected, blocks) in cases {
            let (shape, range, len) = blocks(comm.rank());
            let mut state = State::new();
            state.tensor::<_, f32>("x", &shape, &[range], &Host, &numbers[..len]);
            let error = saver.save(1, state).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = saver.save(1 + comm.rank() as u64, State::new()).unwrap_err().to_string();
        assert!(error.contains("rank 0 saves step 1 and rank 1 saves step 2"), "{error}");
        saver.save(1, State::new()).unwrap();
        saver.finish().unwrap();
        saver.save(1, State::new()).unwrap();
        let error = saver.finish().unwrap_err().to_string();
        assert!(error.contains("step 1 is saved already"), "{error}");
    })
    .unwrap();
}

#[test]
fn what_is_not_there_is_said_with_what_is() {
    let folder = folder();
    assert!(Checkpoint::latest(folder.path().join("none")).unwrap().is_none());
    save_numbers(folder.path(), 2, &counted(5));
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    let error = checkpoint.read::<f64>("y", std::slice::from_ref(&(0..1))).unwrap_err().to_string();
    assert!(error.contains("no tensor \"y\"") && error.contains("which has x"), "{error}");
    let error = checkpoint.read::<f64>("x", std::slice::from_ref(&(3..6))).unwrap_err().to_string();
    assert!(error.contains("elements 3..6") && error.contains("which has 5"), "{error}");
    let error = checkpoint.read::<f32>("x", std::slice::from_ref(&(0..1))).unwrap_err().to_string();
    assert!(error.contains("type F64, and F32"), "{error}");
}

#[test]
fn training_goes_on_while_a_copy_is_written() {
    let folder = folder();
    let (release, released) = channel();
    let (released, release) = (Mutex::new(Some(released)), Mutex::new(Some(release)));
    phalanx::run(1, |comm| {
        let (released, release) =
            (released.lock().unwrap().take().unwrap(), release.lock().unwrap().take().unwrap());
        let released = Mutex::new(released);
        let mut saver = Saver::new(&comm, folder.path()).unwrap().on_progress(move |progress| {
            if matches!(progress, Progress::Begin { .. }) {
                released.lock().unwrap().recv().unwrap();
            }
        });
        let mut numbers = vec![1.0f64; 3];
        for step in 1..=2 {
            let mut state = State::new();
            state.tensor::<_, f64>("x", &[3], std::slice::from_ref(&(0..3)), &Host, &numbers);
            // The second save waits for the first one.
            saver.save(step, state).unwrap();
            assert!(step == 1 || Checkpoint::latest(folder.path()).unwrap().unwrap().step() == 1);
            numbers.fill(2.0);
            release.send(()).unwrap();
        }
        saver.finish().unwrap();
    })
    .unwrap();
    for (found, expected) in list(folder.path()).unwrap().iter().zip([1.0, 2.0]) {
        let checkpoint = Checkpoint::open(&found.folder).unwrap();
        assert_eq!(checkpoint.read::<f64>("x", std::slice::from_ref(&(0..3))).unwrap(), [expected; 3]);
    }
}

#[test]
fn the_last_n_are_kept_and_nothing_else_is_touched() {
    let folder = folder();
    std::fs::create_dir(folder.path().join("step-by-step")).unwrap();
    std::fs::create_dir(folder.path().join("step-000000000")).unwrap(); // an incomplete one
    phalanx::run(2, |comm| {
        let mut saver = Saver::new(&comm, folder.path()).unwrap().keep(2);
        for step in 1..=4 {
            saver.save(step, State::new()).unwrap();
        }
        saver.finish().unwrap();
    })
    .unwrap();
    let steps: Vec<u64> = list(folder.path()).unwrap().iter().map(|found| found.step).collect();
    assert_eq!(steps, [3, 4]);
    assert!(folder.path().join("step-by-step").is_dir());
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_an_error_on_all_ranks_and_the_checkpoint_before_is_untouched() {
    let folder = folder();
    save_numbers(folder.path(), 3, &counted(57));
    let numbers = counted(1000);
    phalanx::run(3, |comm| {
        let full = comm.rank() == 1;
        let mut saver = Saver::new(&comm, folder.path()).unwrap().on_progress(move |progress| {
            if let Progress::Begin { file } = progress
                && full
            {
                std::os::unix::fs::symlink("/dev/full", format!("{}.part", file.display())).unwrap();
            }
        });
        let mut state = State::new();
        let own = part(1000, comm.rank(), 3);
        state.tensor::<_, f64>("x", &[1000], std::slice::from_ref(&own), &Host, &numbers[own.clone()]);
        saver.save(2, state).unwrap();
        let error = saver.finish().unwrap_err();
        match &error {
            Error::File { path, source, .. } if full => {
                assert!(path.ends_with("shard-00001-of-00003.safetensors"), "{error}");
                assert_eq!(source.kind(), std::io::ErrorKind::StorageFull);
            }
            Error::Rank { rank: 1, what } if !full => {
                assert!(what.contains("shard-00001-of-00003.safetensors: cannot be written"), "{what}");
                assert!(what.contains("No space left"), "{what}");
            }
            other => panic!("rank {}: {other}", comm.rank()),
        }
    })
    .unwrap();
    let steps: Vec<u64> = list(folder.path()).unwrap().iter().map(|found| found.step).collect();
    assert_eq!(steps, [1], "what was written of the other is removed");
    let checkpoint = Checkpoint::open(folder.path().join("step-000000001")).unwrap();
    assert_eq!(checkpoint.read::<f64>("x", std::slice::from_ref(&(0..57))).unwrap(), counted(57));
}

#[test]
fn a_folder_that_cannot_be_written_to_is_an_error_on_all_ranks() {
    let folder = folder();
    let file = folder.path().join("file");
    std::fs::write(&file, "not a folder").unwrap();
    phalanx::run(3, |comm| {
        let error = save(&comm, &file, 1, State::new()).unwrap_err();
        let text = error.to_string();
        match error {
            Error::File { .. } => assert_eq!(comm.rank(), 0, "{text}"),
            Error::Rank { rank: 0, .. } => assert_ne!(comm.rank(), 0, "{text}"),
            other => panic!("{other}"),
        }
        assert!(text.contains("step-000000001: cannot be made"), "{text}");
    })
    .unwrap();
}
