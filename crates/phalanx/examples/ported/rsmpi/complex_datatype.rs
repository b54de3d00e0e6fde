//! A struct with an array and another struct in it.

use bytemuck::{Pod, Zeroable};
use phalanx::{Comm, Result, Unchecked};

#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Pair {
    floats: [f32; 2],
    byte: u8,
    padding: [u8; 3],
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Record {
    flag: Unchecked<bool>,
    padding: [u8; 3],
    ints: [i32; 4],
    pair: Pair,
}

pub fn run(comm: &Comm) -> Result<()> {
    let pair = Pair { floats: [-0.1, 0.1], byte: 7, padding: [0; 3] };
    let mut record = Record::zeroed();
    if comm.rank() == 0 {
        record = Record { flag: true.into(), padding: [0; 3], ints: [1, -2, 3, -4], pair };
    }
    let record = comm.broadcast_value(record, 0)?;
    assert!(record.flag.get()?);
    assert_eq!(record.ints, [1, -2, 3, -4]);
    assert_eq!(record.pair, pair);
    Ok(())
}
