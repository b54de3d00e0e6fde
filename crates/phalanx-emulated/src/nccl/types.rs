//! Element types by their codes (`ncclDataType_t`).

use super::result::{INVALID_ARGUMENT, fail};
use crate::arithmetic::DataType::{self, *};
use crate::base::call::Code;
use crate::base::settings::settings;
use std::ffi::c_int;

const ALL: [DataType; 12] = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16, F8E4M3, F8E5M2];

/// The element type with this code, if the reported version has it: 8-bit floats came with 2.24.
pub fn data_type(code: c_int) -> Result<DataType, Code> {
    let known = if settings().nccl_version >= 22400 { 12 } else { 10 };
    let found = ALL.iter().take(known).nth(usize::try_from(code).unwrap_or(usize::MAX));
    found.copied().ok_or_else(|| fail(INVALID_ARGUMENT, format!("the data type {code} is none")))
}
