//! What a module has, in the order of its fields, and whether all ranks have the same.
//!
//! A parameter's id is random on each rank, and only a key into gradients. What ranks have in common is the order of the traversal.

use crate::{Error, Ranks, Result};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor};
use std::collections::HashMap;
use std::fmt::Debug;

/// Path, type and shape of each tensor of a module, a line each.
#[derive(Default)]
pub(crate) struct Layout {
    path: Vec<String>,
    /// Paths by id: a parameter that is there again is tied.
    seen: HashMap<ParamId, String>,
    lines: String,
    /// Parameters of floating-point numbers, each once.
    pub(crate) floats: usize,
}

impl Layout {
    pub(crate) fn of<M: Module>(module: &M) -> Layout {
        let mut layout = Layout::default();
        module.visit(&mut layout);
        layout
    }

    /// Notes a tensor; answers whether it is there for the first time.
    fn note(&mut self, id: ParamId, dtype: impl Debug, dims: &[usize], is_trained: bool) -> bool {
        let path = self.path.join(".");
        let trained = if is_trained { "" } else { ", not trained" };
        self.lines += &format!("{path}: {dtype:?} {dims:?}{trained}");
        let first = self.seen.get(&id);
        if let Some(first) = first {
            self.lines += &format!(", the same as {first}");
        }
        self.lines.push('\n');
        let is_new = first.is_none();
        self.seen.entry(id).or_insert(path);
        is_new
    }

    /// FNV-1a.
    fn hash(&self) -> u64 {
        self.lines.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

impl ModuleVisitor for Layout {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let base = param.base();
        let is_new = self.note(param.id, base.dtype(), &base.dims(), base.is_require_grad());
        self.floats += usize::from(is_new);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let base = param.base();
        self.note(param.id, base.dtype(), &base.dims(), false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let base = param.base();
        self.note(param.id, base.dtype(), &base.dims(), false);
    }
}

impl Ranks {
    /// Compares a module among the ranks, unless they have agreed on it before.
    pub(crate) fn agree(&self, layout: &Layout) -> Result<()> {
        let own = layout.hash();
        if self.agreed.lock().expect("no panic with it locked").contains(&own) {
            return Ok(());
        }
        let mut hashes = vec![0; self.world_size()];
        self.comm().all_gather(&[own], &mut hashes)?;
        let Some(other) = hashes.iter().position(|hash| *hash != hashes[0]) else {
            self.agreed.lock().expect("no panic with it locked").insert(own);
            return Ok(());
        };
        let (of_first, of_other) = (self.lines_of(layout, 0)?, self.lines_of(layout, other)?);
        Err(Error::Mismatch(first_difference(other, &of_first, &of_other)))
    }

    /// A rank's lines, on all ranks.
    fn lines_of(&self, layout: &Layout, rank: usize) -> Result<String> {
        let mut len = [layout.lines.len() as u64];
        self.comm().broadcast_in_place(&mut len, rank)?;
        let mut lines = vec![0; len[0] as usize];
        if self.rank() == rank {
            lines.copy_from_slice(layout.lines.as_bytes());
        }
        self.comm().broadcast_in_place(&mut lines, rank)?;
        Ok(String::from_utf8_lossy(&lines).into_owned())
    }
}

fn first_difference(rank: usize, of_first: &str, of_other: &str) -> String {
    let (mut first, mut other) = (of_first.lines(), of_other.lines());
    loop {
        match (first.next(), other.next()) {
            (a, b) if a == b && a.is_some() => {}
            (a, b) => {
                let none = "no more parameters";
                return format!(
                    "the modules differ: rank 0 has {}, and rank {rank} has {}; make the same module on all ranks",
                    a.unwrap_or(none),
                    b.unwrap_or(none)
                );
            }
        }
    }
}
