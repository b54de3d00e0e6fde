//! Reads the values of `phalanx perf`'s options.

use super::reduction::RedOp;
use super::report::Average;
use crate::parse;
use clap::ValueEnum;
use phalanx::DType;
use phalanx::nccl::GpuAlgorithm;

/// One value, or each in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice<T> {
    One(T),
    All,
}

/// Reads the number that the reference benchmark gives an average.
pub fn average(text: &str) -> Result<Average, String> {
    let all = [Average::OfRank0, Average::Mean, Average::Least, Average::Greatest];
    let chosen = text.parse().ok().and_then(|index: usize| all.get(index).copied());
    chosen.ok_or_else(|| {
        format!(
            "{text:?} is no average: expected 0 (rank 0's), 1 (the mean), 2 (the least) or 3 (the greatest)"
        )
    })
}

/// Reads a count of at least 1.
pub fn count(text: &str) -> Result<usize, String> {
    match parse::count(text) {
        Ok(0) => Err("0 is no count: expected 1, 2, 3, …".to_owned()),
        count => count,
    }
}

/// Reads 0 or 1: off and on in the reference benchmark.
pub fn switch() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(0..=1)
}

/// Reads a reduction.
pub fn reduction(text: &str) -> Result<Choice<RedOp>, String> {
    if text == "all" {
        return Ok(Choice::All);
    }
    RedOp::from_str(text, true).map(Choice::One).map_err(|_| {
        let names: Vec<&str> = RedOp::ALL.iter().map(|op| op.name()).collect();
        format!("{text:?} is no reduction: expected {} or all", names.join(", "))
    })
}

/// Reads what carries collectives on GPUs out.
pub fn algorithm(text: &str) -> Result<GpuAlgorithm, String> {
    let found = GpuAlgorithm::NAMES.into_iter().find(|(name, _)| *name == text);
    let names = || GpuAlgorithm::NAMES.map(|(name, _)| name).join(", ");
    found.map(|(_, algorithm)| algorithm).ok_or_else(|| format!("there is no {text}; there are: {}", names()))
}

/// The name by which [`algorithm`] reads it.
pub fn name_of(algorithm: GpuAlgorithm) -> String {
    let named = GpuAlgorithm::NAMES.into_iter().find(|(_, known)| *known == algorithm);
    named.map_or_else(|| format!("{algorithm:?}"), |(name, _)| name.into())
}

/// Reads an element type, by this library's name or the reference benchmark's.
pub fn dtype(text: &str) -> Result<Choice<DType>, String> {
    let name = match text {
        "all" => return Ok(Choice::All),
        "float" => "f32",
        "double" => "f64",
        "half" => "f16",
        "bfloat16" => "bf16",
        "f8e4m3" | "fp8_e4m3" => "f8e4m3",
        "f8e5m2" | "fp8_e5m2" => "f8e5m2",
        "int8" => "i8",
        "uint8" => "u8",
        "int32" => "i32",
        "uint32" => "u32",
        "int64" => "i64",
        "uint64" => "u64",
        name => name,
    };
    DType::from_name(name).map(Choice::One).ok_or_else(|| {
        let names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        format!("{text:?} is no element type: expected {} or all", names.join(", "))
    })
}

/// Reads a root. -1 is all, as in the reference benchmark.
pub fn root(text: &str) -> Result<Choice<usize>, String> {
    match text {
        "all" | "-1" => Ok(Choice::All),
        _ => text.parse().map(Choice::One).map_err(|_| format!("{text:?}: expected a rank, or all")),
    }
}
