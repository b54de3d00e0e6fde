//! Reduction operators (`ncclRedOp_t`): the built-in ones, and sums with a factor for each rank.

use super::communicator::{Communicator, Need, enter};
use super::operation::{Factor, Reduction};
use super::reduce::Combine;
use super::result::{INVALID_ARGUMENT, INVALID_USAGE, fail};
use super::types::DataType;
use crate::call::{Answer, Code};
use crate::cuda::allocation::given;
use crate::handles::Handle;
use crate::pointers::{In, Out};
use crate::settings::settings;
use crate::violation::violation;
use std::collections::BTreeMap;
use std::ffi::c_int;

/// The first operator that is not built in.
const DYNAMIC: c_int = 5;

/// A communicator's own operators. One that was destroyed is `None`.
#[derive(Default)]
pub struct Reductions(BTreeMap<c_int, Option<Made>>);

#[derive(Clone, Copy)]
struct Made {
    dtype: DataType,
    factor: Factor,
}

/// The operator of a call.
pub fn find(
    function: &str,
    communicator: &Communicator,
    operator: c_int,
    dtype: c_int,
) -> Result<Reduction, Code> {
    let combine = match operator {
        0 => Combine::Sum,
        1 => Combine::Prod,
        2 => Combine::Max,
        3 => Combine::Min,
        4 => Combine::Avg,
        _ => return find_made(function, communicator, operator, dtype),
    };
    Ok(Reduction { combine, factor: Factor::None })
}

fn find_made(
    function: &str,
    communicator: &Communicator,
    operator: c_int,
    dtype: c_int,
) -> Result<Reduction, Code> {
    let invalid =
        |why| fail(INVALID_ARGUMENT, format!("{function} : the reduction operator {operator:#x} {why}"));
    match communicator.state().reductions.0.get(&operator) {
        None => Err(invalid("is none of this communicator")),
        Some(None) => violation(function, "the reduction operator was destroyed by ncclRedOpDestroy before"),
        Some(Some(made)) if made.dtype.code() as c_int != dtype => Err(invalid("is for another data type")),
        Some(Some(made)) => Ok(Reduction { combine: Combine::PreMulSum, factor: made.factor }),
    }
}

/// 8-bit floats are reduced by devices of compute capability 9.0 and more.
pub fn check_float8() -> Answer {
    if settings().compute_capability >= (9, 0) {
        return Ok(());
    }
    Err(fail(INVALID_ARGUMENT, "FP8 reduction support begins with sm90 capable devices."))
}

exported! {
    fn ncclRedOpCreatePreMulSum(op: Out<c_int>, scalar: In<u8>, dtype: c_int, residence: c_int, comm: Handle) {
        let call = enter(FUNCTION, comm, Need::Ready)?;
        let dtype = DataType::from_code(dtype)?;
        if op.is_null() || scalar.is_null() {
            return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : op or scalar argument is NULL")));
        }
        let factor = match residence {
            // On the device: read at each execution.
            0 => Factor::Device(given(FUNCTION, "the scalar", scalar.address(), dtype.size())),
            1 => {
                let mut bytes = [0; 8];
                bytes[..dtype.size()].copy_from_slice(scalar.slice(dtype.size()));
                Factor::Value(bytes)
            }
            _ => return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : residence {residence} is none"))),
        };
        let mut state = call.state();
        let made = &mut state.reductions.0;
        // Handles of different communicators differ, as NCCL's do.
        let handle = DYNAMIC + (call.handle as c_int & 0x3fff_fff0) + made.len() as c_int;
        made.insert(handle, Some(Made { dtype, factor }));
        op.set(handle);
        Ok(())
    }

    fn ncclRedOpDestroy(op: c_int, comm: Handle) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        if (0..DYNAMIC).contains(&op) {
            return Err(fail(INVALID_ARGUMENT, "ncclRedOpDestroy : operator is a NCCL builtin."));
        }
        match call.state().reductions.0.get_mut(&op).map(Option::take) {
            Some(Some(_)) => Ok(()),
            Some(None) => violation(FUNCTION, "the reduction operator was destroyed by ncclRedOpDestroy before"),
            None => Err(fail(INVALID_USAGE, format!("{FUNCTION} : {op:#x} is no operator of this communicator"))),
        }
    }
}
