//! Element types (`ncclDataType_t`).

use super::result::{INVALID_ARGUMENT, fail};
use crate::call::Code;
use crate::settings::settings;
use std::ffi::c_int;

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    F8E4M3,
    F8E5M2,
}

use DataType::*;

const ALL: [DataType; 12] = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16, F8E4M3, F8E5M2];

impl DataType {
    /// The type with this code in the reported version.
    pub fn from_code(code: c_int) -> Result<DataType, Code> {
        let known = if settings().nccl_version >= 22400 { 12 } else { 10 };
        let found = ALL.iter().take(known).nth(usize::try_from(code).unwrap_or(usize::MAX));
        found.copied().ok_or_else(|| fail(INVALID_ARGUMENT, format!("the data type {code} is none")))
    }

    /// Its code.
    pub fn code(self) -> u64 {
        self as u64
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            I8 | U8 | F8E4M3 | F8E5M2 => 1,
            F16 | Bf16 => 2,
            I32 | U32 | F32 => 4,
            I64 | U64 | F64 => 8,
        }
    }
}
