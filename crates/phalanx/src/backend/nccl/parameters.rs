//! The library's environment parameters.

use crate::types::error::{Error, Result};
use phalanx_sys::nccl::{Flavour, ncclResult_t};
use std::collections::BTreeMap;
use std::ffi::CStr;

/// What the loaded library takes from its parameters, by their names in the environment
/// (`ncclParamGetAllParameterKeys`, `ncclParamGetParameter`; 2.30.4). Needs no GPU. NCCL answers those that
/// it documents and has moved to this interface, few as of 2.32; with `NCCL_PARAM_DUMP_ALL=true` some more.
///
/// # Errors
/// [`Error::MissingFunction`](crate::Error) if the library is too old.
pub fn parameters() -> Result<BTreeMap<String, String>> {
    let library = super::library::load(Flavour::Nccl)?;
    let names = ["ncclParamGetAllParameterKeys", "ncclParamGetParameter"];
    let all = library.need(library.ncclParamGetAllParameterKeys, names[0])?;
    let get = library.need(library.ncclParamGetParameter, names[1])?;
    let answered = |result, name| match result {
        ncclResult_t::Success => Ok(()),
        error => Err(Error::from(library.error(error, name))),
    };
    let (mut table, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: out-pointers on the stack, written during the call.
    answered(unsafe { all(&raw mut table, &raw mut len) }, names[0])?;
    // SAFETY: a table of so many texts, which is the library's until this thread asks for the next.
    let keys = (0..len as usize).map(|index| unsafe { CStr::from_ptr(*table.add(index)) }.to_owned());
    keys.collect::<Vec<_>>()
        .into_iter()
        .map(|key| {
            let (mut value, mut len) = (std::ptr::null(), 0);
            // SAFETY: a text, and out-pointers on the stack.
            answered(unsafe { get(key.as_ptr(), &raw mut value, &raw mut len) }, names[1])?;
            let value = match value.is_null() {
                true => String::new(),
                // SAFETY: a text, which is the library's until this thread asks for the next.
                false => unsafe { CStr::from_ptr(value) }.to_string_lossy().into_owned(),
            };
            Ok((key.to_string_lossy().into_owned(), value))
        })
        .collect()
}
