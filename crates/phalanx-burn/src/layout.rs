//! What a module has, in the order of its fields, and whether all ranks have the same.
//!
//! A parameter's id is random on each rank, and only a key into gradients. What ranks have in common is the order of the traversal.

use crate::{Error, Ranks, Result};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Int, Tensor};
use std::collections::HashMap;
use std::fmt::{self, Write};

/// A line for each tensor of a module: path, type and shape.
pub(crate) struct Layout<W> {
    path: Vec<String>,
    /// Numbers of the tensors by id: a parameter that is there again is tied.
    seen: HashMap<ParamId, usize>,
    lines: W,
}

impl<W: Write + Default> Layout<W> {
    fn of<M: Module>(module: &M) -> W {
        let mut layout = Layout { path: Vec::new(), seen: HashMap::new(), lines: W::default() };
        module.visit(&mut layout);
        layout.lines
    }

    fn note(&mut self, id: ParamId, dtype: DType, dims: &[usize], is_trained: bool) {
        let number = self.seen.len();
        let first = *self.seen.entry(id).or_insert(number);
        let mut write = || {
            for (depth, name) in self.path.iter().enumerate() {
                write!(self.lines, "{}{name}", if depth == 0 { "" } else { "." })?;
            }
            write!(self.lines, ": {dtype:?} {dims:?}{}", if is_trained { "" } else { ", not trained" })?;
            if first < number {
                write!(self.lines, ", tied to parameter {first}")?;
            }
            self.lines.write_char('\n')
        };
        write().expect("memory takes all that is written");
    }
}

impl<W: Write + Default> ModuleVisitor for Layout<W> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let base = param.base();
        self.note(param.id, base.dtype(), &base.dims(), base.is_require_grad());
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

/// FNV-1a of what is written.
struct Hash(u64);

impl Default for Hash {
    fn default() -> Hash {
        Hash(0xcbf2_9ce4_8422_2325)
    }
}

impl Write for Hash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let add = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 = text.bytes().fold(self.0, add);
        Ok(())
    }
}

impl Ranks {
    /// Compares a module among the ranks, unless they have agreed on it before.
    pub(crate) fn agree<M: Module>(&self, module: &M) -> Result<()> {
        let Hash(own) = Layout::of(module);
        if self.agreed.lock().expect("no panic with it locked").contains(&own) {
            return Ok(());
        }
        let mut hashes = vec![0; self.world_size()];
        self.comm().all_gather(&[own], &mut hashes)?;
        let Some(other) = hashes.iter().position(|hash| *hash != hashes[0]) else {
            self.agreed.lock().expect("no panic with it locked").insert(own);
            return Ok(());
        };
        let own: String = Layout::of(module);
        let (of_first, of_other) = (self.text_of(&own, 0)?, self.text_of(&own, other)?);
        Err(Error::Mismatch(first_difference(other, &of_first, &of_other)))
    }

    /// A rank's text, on all ranks.
    fn text_of(&self, own: &str, rank: usize) -> Result<String> {
        let mut len = [own.len() as u64];
        self.comm().broadcast_in_place(&mut len, rank)?;
        let mut text = vec![0; len[0] as usize];
        if self.rank() == rank {
            text.copy_from_slice(own.as_bytes());
        }
        self.comm().broadcast_in_place(&mut text, rank)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
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
