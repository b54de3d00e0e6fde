//! Files of distributed arrays: written by some ranks, read by others.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{ArrayPart, Comm, Element, Error, Plain, TensorPart};
use phalanx_testkit::Scenario;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("files/arrays", |comm, _| outcome(arrays(&comm))),
    Scenario::rank("files/tensors", |comm, _| outcome(tensors(&comm))),
    Scenario::rank("files/refused", |comm, _| outcome(refused(&comm))),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 4])).collect()
}

/// A folder of this test's own, the same on all ranks; rank 0 removes it.
struct Folder(PathBuf, bool);

impl Folder {
    fn new(comm: &Comm, name: &str) -> Result<Folder, Box<dyn std::error::Error>> {
        let number = comm.broadcast_value(std::process::id(), 0)?;
        let folder =
            std::env::temp_dir().join(format!("phalanx-files-{name}-{}-{number}", comm.world_size()));
        if comm.rank() == 0 {
            std::fs::create_dir_all(&folder)?;
        }
        comm.barrier()?;
        Ok(Folder(folder, comm.rank() == 0))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.1 {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

fn of_part<T>(part: &ArrayPart, value: impl Fn(usize) -> T) -> Vec<T> {
    part.iter().flatten().map(value).collect()
}

/// Parts of an array of this length on every rank, which each of these ways gives.
fn ways(comm: &Comm, whole: usize) -> Vec<(String, ArrayPart)> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut ways = vec![("block".into(), ArrayPart::block(whole, rank, ranks))];
    for block in [1, 7, 3000] {
        ways.push((format!("cyclic {block}"), ArrayPart::block_cyclic(whole, block, rank, ranks)));
    }
    // From the end to the beginning.
    let backwards = (0..whole).step_by(500).map(|start| start..whole.min(start + 500)).rev();
    let own = backwards.enumerate().filter(|(number, _)| number % ranks == rank).map(|(_, range)| range);
    ways.push(("ranges".into(), ArrayPart::ranges(whole, own).expect("in the array")));
    ways
}

fn arrays(comm: &Comm) -> Done {
    // Of no elements, of one, and of pieces that are long.
    written_and_read(comm, [0, 10_007], |index| [index as u8, 1, 2])?;
    written_and_read(comm, [1, 400_000], |index| index as f64)
}

fn written_and_read<T: Plain + PartialEq + Debug + Default>(
    comm: &Comm,
    wholes: [usize; 2],
    value: impl Fn(usize) -> T,
) -> Done {
    let folder = Folder::new(comm, &format!("arrays-{}", size_of::<T>()))?;
    // MPI-IO would take the first word of a name with a colon for a file system.
    for (whole, name) in wholes.into_iter().zip(["run:12", "array"]) {
        let path = folder.file(name);
        for (way, part) in ways(comm, whole) {
            comm.write_at_all(&path, &part, &of_part(&part, &value))?;
            if comm.rank() == 0 {
                let bytes = std::fs::read(&path)?;
                let expected: Vec<T> = (0..whole).map(&value).collect();
                // SAFETY: plain data has no padding.
                let expected = unsafe {
                    std::slice::from_raw_parts(expected.as_ptr().cast::<u8>(), size_of_val(&expected[..]))
                };
                same(&format!("{whole} elements, {way}"), bytes == expected, true)?;
            }
            for (other, part) in ways(comm, whole) {
                let mut read = of_part(&part, |_| T::default());
                comm.read_at_all(&path, &part, &mut read)?;
                same(&format!("{whole} elements, {way}, {other}"), read == of_part(&part, &value), true)?;
            }
            comm.barrier()?;
        }
        // Ranges that have elements in common, none in order.
        let ranges = [whole / 2..whole, 0..whole / 3, whole / 4..whole];
        let part = ArrayPart::ranges(whole, ranges)?;
        let mut read = of_part(&part, |_| T::default());
        comm.read_at_all(&path, &part, &mut read)?;
        same(&format!("{whole} elements, in common"), read == of_part(&part, &value), true)?;
    }
    // Nothing but the files is left.
    if comm.rank() == 0 {
        same("files", std::fs::read_dir(&folder.0)?.count(), 2)?;
    }
    Ok(comm.barrier()?)
}

fn tensors(comm: &Comm) -> Done {
    fn read<T: Element>(
        comm: &Comm,
        path: &Path,
        name: &str,
        whole: usize,
        value: impl Fn(usize) -> T,
    ) -> Done {
        for (way, part) in ways(comm, whole) {
            let mut data = of_part(&part, |_| value(77));
            comm.read_tensor_at_all(path, name, &part, &mut data)?;
            same(&format!("{name}, {way}"), data, of_part(&part, &value))?;
        }
        Ok(())
    }
    let folder = Folder::new(comm, "tensors")?;
    let path = folder.file("model.safetensors");
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let [weight, bias] =
        [ArrayPart::block_cyclic(30 * 20, 20, rank, ranks), ArrayPart::block(31, rank, ranks)];
    let (weights, biases) = (of_part(&weight, |index| index as f32), of_part(&bias, |index| index as i64));
    let tensors = [
        TensorPart::new("weight", &[30, 20], &weight, &weights)?,
        TensorPart::new("bias", &[31], &bias, &biases)?,
    ];
    comm.write_tensors_at_all(&path, &tensors)?;
    read(comm, &path, "weight", 600, |index| index as f32)?;
    read(comm, &path, "bias", 31, |index| index as i64)?;
    let part = ArrayPart::block(31, rank, ranks);
    let mut data = vec![0i64; part.len()];
    let wrong = [
        (comm.read_tensor_at_all(&path, "other", &part, &mut data), "it has no tensor \"other\""),
        (
            comm.read_tensor_at_all(&path, "weight", &part, &mut data),
            "has 600 elements of type F32, not 31 of I64",
        ),
    ];
    for (outcome, says) in wrong {
        let text = outcome.err().ok_or("it was read")?.to_string();
        same(&text, text.contains(says), true)?;
    }
    // Each rank names its own.
    let name = format!("of rank {rank}");
    let own = [TensorPart::new(&name, &[31], &bias, &biases)?];
    if ranks > 1 {
        let text = comm.write_tensors_at_all(&path, &own).err().ok_or("it was written")?.to_string();
        same(&text, text.contains("other tensors on rank"), true)?;
    }
    let shape = TensorPart::new("weight", &[30, 21], &weight, &weights);
    same("another shape", shape.is_err(), true)?;
    // The file is as it was.
    read(comm, &path, "bias", 31, |index| index as i64)
}

fn refused(comm: &Comm) -> Done {
    let folder = Folder::new(comm, "refused")?;
    let path = folder.file("array");
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let part = ArrayPart::block(100, rank, ranks);
    let data = vec![5u16; part.len()];
    comm.write_at_all(&path, &part, &data)?;
    let longer = vec![5u16; part.len() + 1];
    same(
        "a buffer that is too long",
        matches!(comm.write_at_all(&path, &part, &longer), Err(Error::Usage(_))),
        true,
    )?;
    let says = |outcome: phalanx::Result<()>, says: &str| -> Done {
        let text = outcome.err().ok_or_else(|| format!("no error: {says}"))?.to_string();
        Ok(same(&text, text.contains(says), true)?)
    };
    // The last rank's part is of another array, or has fewer elements.
    let is_last = rank + 1 == ranks;
    if ranks > 1 {
        let other = if is_last { ArrayPart::block(101, 0, 101) } else { part.clone() };
        let data = vec![6u16; other.len()];
        says(comm.write_at_all(&path, &other, &data), &format!("101 elements on rank {}", ranks - 1))?;
    }
    let fewer = if is_last { ArrayPart::ranges(100, [])? } else { part.clone() };
    let fewer_data = vec![6u16; fewer.len()];
    says(comm.write_at_all(&path, &fewer, &fewer_data), "the 100 elements of the array")?;
    // A folder that is not there is an error on all ranks, and so is a file that one rank cannot read.
    let nowhere = folder.file("nowhere/array");
    says(
        comm.write_at_all(&nowhere, &part, &data),
        if rank == 0 { "No such file" } else { "rank 0 could not" },
    )?;
    let own = if is_last { folder.file("nothing") } else { path.clone() };
    let mut read = vec![0u16; part.len()];
    let of_last = format!("rank {} could not", ranks - 1);
    says(comm.read_at_all(&own, &part, &mut read), if is_last { "No such file" } else { &of_last })?;
    let whole = ArrayPart::block(101, rank, ranks);
    let mut read = vec![0u16; whole.len()];
    says(
        comm.read_at_all(&path, &whole, &mut read),
        "it has 200 bytes, and an array of 101 elements has 202",
    )?;
    // After all that the file is what was written.
    let mut read = vec![0u16; part.len()];
    comm.read_at_all(&path, &part, &mut read)?;
    same("the file", read, data)?;
    Ok(comm.barrier()?)
}
