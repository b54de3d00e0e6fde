//! Which MPI type and operation combine what.
//!
//! MPI's own operations serve where they mean what [`ReduceOp`](crate::ReduceOp) documents. Minimum and maximum of
//! floats, which MPI leaves open for NaN, are operations of our own. What is accumulated in another type (small
//! floats, averages) or scaled first goes through a buffer of that type, so that it is rounded once, as documented.
//! The order of the ranks is MPI's.

use super::accumulate::{Accumulated, add_i128};
use super::process::Process;
use super::{Failure, check};
use crate::backend::host::Reducer;
use crate::dtype::DType;
use crate::op::ReductionCode;
use phalanx_sys::mpi::{Handle, Mpi, UserFunction};
use std::ffi::{c_int, c_void};

/// How a reduction is done.
pub(super) enum Plan {
    /// MPI combines the elements.
    Direct { datatype: Handle, op: Handle },
    /// The same, and each result is divided by the number of ranks.
    Divided { datatype: Handle, op: Handle, accumulated: Accumulated },
    /// MPI combines accumulators.
    Accumulated { datatype: Handle, op: Handle, accumulated: Accumulated },
}

/// Operations and types that MPI does not have.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnOperations {
    /// Minimum and maximum of each float type, see [`FLOATS`].
    min: [Handle; FLOATS.len()],
    max: [Handle; FLOATS.len()],
    /// A 128-bit integer, and its sum.
    int128: Handle,
    add_int128: Handle,
}

const FLOATS: [DType; 6] = [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2];

/// `inout[i] = in[i] ∘ inout[i]`, for MPI.
unsafe extern "C" fn own<const DTYPE: u8, const CODE: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    len: *mut c_int,
    _: *mut Handle,
) {
    let dtype = DType::from_code(DTYPE).expect("one of the types");
    let code = ReductionCode::from_code(CODE).expect("one of the reductions");
    // SAFETY: MPI gives `len` elements of the type that the operation is used with, in both arrays; the target is one
    // of the sources.
    unsafe {
        let (input, inout) = (input.cast::<u8>(), inout.cast::<u8>());
        Reducer::new(dtype, code).run(&[inout], &[input, inout], &[], *len as usize, false);
    }
}

const fn own_of<const CODE: u8>() -> [UserFunction; FLOATS.len()] {
    [
        own::<{ DType::F32 as u8 }, CODE>,
        own::<{ DType::F64 as u8 }, CODE>,
        own::<{ DType::F16 as u8 }, CODE>,
        own::<{ DType::Bf16 as u8 }, CODE>,
        own::<{ DType::F8E4M3 as u8 }, CODE>,
        own::<{ DType::F8E5M2 as u8 }, CODE>,
    ]
}

impl Default for OwnOperations {
    fn default() -> OwnOperations {
        let none = [Handle::ZERO; FLOATS.len()];
        OwnOperations { min: none, max: none, int128: Handle::ZERO, add_int128: Handle::ZERO }
    }
}

impl OwnOperations {
    /// Makes them; they live as long as MPI.
    pub fn create(mpi: &Mpi) -> Result<OwnOperations, Failure> {
        let functions = &mpi.functions;
        let create = |function: UserFunction| {
            let mut op = Handle::ZERO;
            // SAFETY: MPI is initialised; the function is there as long as the process. All of them commute.
            check("MPI_Op_create", unsafe { (functions.op_create)(function, 1, &raw mut op) })?;
            Ok(op)
        };
        let mut own = OwnOperations { add_int128: create(add_i128)?, ..OwnOperations::default() };
        let (min, max) = (own_of::<{ ReductionCode::Min as u8 }>(), own_of::<{ ReductionCode::Max as u8 }>());
        for float in 0..FLOATS.len() {
            own.min[float] = create(min[float])?;
            own.max[float] = create(max[float])?;
        }
        // SAFETY: MPI is initialised; the variable takes the new handle.
        unsafe {
            let made = (functions.type_contiguous)(16, mpi.constants.byte, &raw mut own.int128);
            check("MPI_Type_contiguous", made)?;
            check("MPI_Type_commit", (functions.type_commit)(&raw mut own.int128))?;
        }
        Ok(own)
    }
}

impl Process {
    /// How elements of a type are combined.
    #[inline]
    pub fn plan(&self, dtype: DType, code: ReductionCode) -> Plan {
        use ReductionCode::*;
        let constants = &self.mpi.constants;
        let float = FLOATS.iter().position(|float| *float == dtype);
        let small = !matches!(dtype, DType::F32 | DType::F64) && float.is_some();
        let datatype = self.datatype(dtype);
        match (code, float) {
            (Min, Some(float)) => return Plan::Direct { datatype, op: self.own.min[float] },
            (Max, Some(float)) => return Plan::Direct { datatype, op: self.own.max[float] },
            (Min, None) => return Plan::Direct { datatype, op: constants.min },
            (Max, None) => return Plan::Direct { datatype, op: constants.max },
            (Sum, _) if !small => return Plan::Direct { datatype, op: constants.sum },
            (Prod, _) if !small => return Plan::Direct { datatype, op: constants.prod },
            _ => {}
        }
        let accumulated = Accumulated::new(dtype, code);
        match (code, dtype) {
            (Avg, DType::F32 | DType::F64) => Plan::Divided { datatype, op: constants.sum, accumulated },
            (Avg, DType::I64 | DType::U64) => {
                Plan::Accumulated { datatype: self.own.int128, op: self.own.add_int128, accumulated }
            }
            _ => {
                let datatype = match (code, dtype) {
                    _ if small => constants.float,
                    (Avg, DType::I8 | DType::U8 | DType::I16 | DType::U16) => constants.int32,
                    (Avg, _) => constants.int64,
                    _ => datatype,
                };
                let op = if code == Prod { constants.prod } else { constants.sum };
                Plan::Accumulated { datatype, op, accumulated }
            }
        }
    }
}
