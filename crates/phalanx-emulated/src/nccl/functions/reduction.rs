//! The functions that create and destroy reduction operators.

use crate::base::handles::Handle;
use crate::base::pointers::{In, Out};
use crate::cuda::memory::Range;
use crate::nccl::communicator::reductions::{Factor, is_built_in};
use crate::nccl::communicator::{Need, enter};
use crate::nccl::group::nccl;
use crate::nccl::result::{INVALID_ARGUMENT, fail};
use crate::nccl::types::data_type;
use std::ffi::c_int;

nccl! {
    fn ncclRedOpCreatePreMulSum(op: Out<c_int>, scalar: In<u8>, dtype: c_int, residence: c_int, comm: Handle) {
        let call = enter(FUNCTION, comm, Need::Ready)?;
        let dtype = data_type(dtype)?;
        if op.is_null() || scalar.is_null() {
            return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : op or scalar argument is NULL")));
        }
        let factor = match residence {
            // On the device: read at each execution.
            0 => Factor::Device(Range::given(FUNCTION, "the scalar", scalar.address(), dtype.size())),
            1 => {
                let mut bytes = [0; 8];
                bytes[..dtype.size()].copy_from_slice(scalar.slice(dtype.size()));
                Factor::Value(bytes)
            }
            _ => return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : residence {residence} is none"))),
        };
        op.set(call.state().reductions.create(call.handle, dtype, factor));
        Ok(())
    }

    fn ncclRedOpDestroy(op: c_int, comm: Handle) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        if is_built_in(op) {
            return Err(fail(INVALID_ARGUMENT, "ncclRedOpDestroy : operator is a NCCL builtin."));
        }
        call.state().reductions.destroy(FUNCTION, op)
    }
}
