//! What each rank has, and which of it each rank writes.

use super::manifest::Runs;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// What a rank has.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Inventory {
    pub step: u64,
    pub tensors: Vec<Held>,
    pub values: BTreeMap<String, Value>,
}

/// A tensor of which a rank has a block.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Held {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub block: Runs,
}

/// A block of a tensor and the rank that writes it.
#[derive(Debug)]
pub(super) struct Owned {
    pub name: String,
    pub block: Runs,
    pub owner: usize,
}

/// Type and shape of a tensor.
pub(super) type Kind = (Dtype, Vec<usize>);

#[derive(Debug)]
pub(super) struct Plan {
    pub tensors: BTreeMap<String, Kind>,
    pub owned: Vec<Owned>,
    pub values: BTreeMap<String, Vec<Value>>,
}

impl Plan {
    /// The same on every rank. Blocks that several ranks have are written once, by those that have least to write.
    pub fn new(ranks: &[Inventory]) -> Result<Plan, String> {
        if let Some(other) = ranks.iter().position(|rank| rank.step != ranks[0].step) {
            return Err(format!(
                "rank 0 saves step {} and rank {other} saves step {}: save the same step on all ranks",
                ranks[0].step, ranks[other].step
            ));
        }
        let tensors = kinds(ranks)?;
        let mut blocks: BTreeMap<(&str, &Runs), Vec<usize>> = BTreeMap::new();
        for (rank, inventory) in ranks.iter().enumerate() {
            for held in inventory.tensors.iter().filter(|held| held.block.len() > 0) {
                blocks.entry((&held.name, &held.block)).or_default().push(rank);
            }
        }
        check_cover(&tensors, &blocks)?;
        let bytes = |name: &str, block: &Runs| block.len() * super::bytes::size(tensors[name].0);
        let mut order: Vec<_> = blocks.into_iter().collect();
        // Blocks that one rank alone can write come first, then the longest.
        order.sort_by_key(|((name, block), holders)| {
            (holders.len() > 1, std::cmp::Reverse(bytes(name, block)))
        });
        let mut load = vec![0; ranks.len()];
        let mut owned = Vec::new();
        for ((name, block), holders) in order {
            let owner = holders.into_iter().min_by_key(|rank| load[*rank]).unwrap_or(0);
            load[owner] += bytes(name, block);
            owned.push(Owned { name: name.into(), block: block.clone(), owner });
        }
        Ok(Plan { owned, values: values(ranks), tensors })
    }
}

fn kinds(ranks: &[Inventory]) -> Result<BTreeMap<String, Kind>, String> {
    let mut first: BTreeMap<&str, (usize, &Held)> = BTreeMap::new();
    for (rank, inventory) in ranks.iter().enumerate() {
        for held in &inventory.tensors {
            let name = &held.name;
            let (other, known) = *first.entry(name).or_insert((rank, held));
            if (known.dtype, &known.shape) != (held.dtype, &held.shape) {
                return Err(format!(
                    "tensor {name:?} is {:?} {:?} on rank {other} and {:?} {:?} on rank {rank}: give its whole shape \
                     and one type on all ranks",
                    known.dtype, known.shape, held.dtype, held.shape
                ));
            }
            if inventory.tensors.iter().filter(|other| other.name == *name).count() > 1 {
                return Err(format!(
                    "rank {rank} has two tensors called {name:?}: give each a name of its own"
                ));
            }
        }
    }
    Ok(first.into_iter().map(|(name, (_, held))| (name.into(), (held.dtype, held.shape.clone()))).collect())
}

/// Blocks are the same or have nothing in common, and together they are the whole tensor.
fn check_cover(
    tensors: &BTreeMap<String, Kind>,
    blocks: &BTreeMap<(&str, &Runs), Vec<usize>>,
) -> Result<(), String> {
    let mut ranges: BTreeMap<&str, Vec<(usize, usize, usize)>> = BTreeMap::new();
    for ((name, block), holders) in blocks {
        let of_block = block.ranges().map(|range| (range.start, range.end, holders[0]));
        ranges.entry(name).or_default().extend(of_block);
    }
    for (name, (_, shape)) in tensors {
        let len: usize = shape.iter().product();
        let mut ranges = ranges.remove(&**name).unwrap_or_default();
        ranges.sort_unstable();
        let (mut reached, mut before) = (0, 0);
        if let Some((start, end, rank)) = ranges.iter().find(|(_, end, _)| *end > len) {
            return Err(format!(
                "rank {rank} has elements {start}..{end} of tensor {name:?}, which has {len} ({shape:?}): give the shape \
                 of the whole tensor, and ranges of it"
            ));
        }
        for (start, end, rank) in ranges.into_iter().chain([(len, len, 0)]) {
            if start > reached {
                return Err(format!(
                    "elements {reached}..{start} of tensor {name:?} are on no rank: every element of {shape:?} must be"
                ));
            }
            if start < reached {
                return Err(format!(
                    "elements {start}..{} of tensor {name:?} are in different blocks, of ranks {before} and {rank}: \
                     blocks must be the same, or have nothing in common",
                    reached.min(end)
                ));
            }
            (reached, before) = (end, rank);
        }
    }
    Ok(())
}

fn values(ranks: &[Inventory]) -> BTreeMap<String, Vec<Value>> {
    let names = ranks.iter().flat_map(|rank| rank.values.keys());
    let of = |name: &String| {
        let all: Vec<Value> =
            ranks.iter().map(|rank| rank.values.get(name).cloned().unwrap_or_default()).collect();
        if all.iter().all(|value| *value == all[0]) { all[..1].to_vec() } else { all }
    };
    names.map(|name| (name.clone(), of(name))).collect()
}
