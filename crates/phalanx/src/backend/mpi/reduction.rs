//! The MPI type and operation of each reduction.
//!
//! MPI's own operations are used where they do what [`ReduceOp`](crate::ReduceOp) documents. The others are
//! our own:
//! - minimum and maximum, since MPI leaves NaN open, and MPICH 4.0 takes unsigned integers as signed;
//! - sum and product of 8-bit and 16-bit integers, which saturate in Open MPI with AVX.
//!
//! Reductions that accumulate in another type (small floats, averages) or scale first go through a buffer of
//! that type, so that the result is rounded once, as documented. The order of the ranks is MPI's.
//!
//! Operations on truth make each element 0 or 1 in such a buffer, and combine its bits. So a result is 0 or 1 also where a rank is alone.

use super::accumulate::{Accumulated, add_i128};
use super::{MpiFailure, check, datatype};
use crate::reduce::{Reducer, Targets};
use crate::types::dtype::DType;
use crate::types::op::ReductionCode;
use phalanx_sys::mpi::{Constants, Handle, Mpi, UserFunction};
use std::ffi::{c_int, c_void};

/// The plan of each type and reduction.
pub(crate) type Plans = [[ReductionPlan; CODES.len()]; DType::ALL.len()];

/// What MPI combines: all but what knows its elements itself.
const CODES: [ReductionCode; 12] = {
    use ReductionCode::*;
    [Sum, Prod, Min, Max, Avg, PreMulSum, BitAnd, BitOr, BitXor, LogicalAnd, LogicalOr, LogicalXor]
};

/// How a reduction is done.
#[derive(Clone, Copy)]
pub(crate) enum ReductionPlan {
    /// MPI combines the elements.
    Direct { datatype: Handle, op: Handle },
    /// MPI combines the elements, and each result is divided by the number of ranks.
    Divided { datatype: Handle, op: Handle, accumulated: Accumulated },
    /// MPI combines accumulators.
    Accumulated { datatype: Handle, op: Handle, accumulated: Accumulated },
}

/// Operations and types that MPI lacks.
struct OwnOperations {
    /// By type and reduction; [`Handle::ZERO`] where there is none.
    ops: [[Handle; CODES.len()]; DType::ALL.len()],
    /// A 128-bit integer, and its sum.
    int128: Handle,
    add_int128: Handle,
}

/// The types and reductions that have an operation of our own.
const OWN: [(DType, ReductionCode, UserFunction); 36] = {
    use DType::*;
    use ReductionCode::*;
    macro_rules! own {
        ($($dtype:ident $code:ident),*) => {
            [$(($dtype, $code, own::<{ $dtype.code() }, { $code as u8 }>)),*]
        };
    }
    own![
        F32 Min, F64 Min, F16 Min, Bf16 Min, F8E4M3 Min, F8E5M2 Min,
        I8 Min, U8 Min, I16 Min, U16 Min, I32 Min, U32 Min, I64 Min, U64 Min,
        F32 Max, F64 Max, F16 Max, Bf16 Max, F8E4M3 Max, F8E5M2 Max,
        I8 Max, U8 Max, I16 Max, U16 Max, I32 Max, U32 Max, I64 Max, U64 Max,
        I8 Sum, U8 Sum, I16 Sum, U16 Sum, I8 Prod, U8 Prod, I16 Prod, U16 Prod
    ]
};

/// `inout[i] = in[i] ∘ inout[i]`, for MPI.
unsafe extern "C" fn own<const DTYPE: u8, const CODE: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    len: *mut c_int,
    _: *mut Handle,
) {
    let dtype = *DType::ALL.get(usize::from(DTYPE)).expect("one of the types");
    let code = ReductionCode::from_code(CODE).expect("one of the reductions");
    // SAFETY: MPI gives `len` elements of the type that the operation is used with, in both arrays; the
    // target is one of the sources.
    unsafe {
        let (input, inout) = (input.cast::<u8>(), inout.cast::<u8>());
        Reducer::new(dtype, code).run(Targets::new(&[inout], false), &[input, inout], &[], *len as usize);
    }
}

impl Default for OwnOperations {
    fn default() -> OwnOperations {
        let none = Handle::ZERO;
        OwnOperations { ops: [[none; CODES.len()]; DType::ALL.len()], int128: none, add_int128: none }
    }
}

impl OwnOperations {
    /// Creates them; they live as long as MPI.
    fn create(mpi: &Mpi) -> Result<OwnOperations, MpiFailure> {
        let functions = &mpi.functions;
        let create = |function: UserFunction| {
            let mut op = Handle::ZERO;
            // SAFETY: MPI is initialised; the function is there as long as the process. All of them commute.
            check("MPI_Op_create", unsafe { (functions.op_create)(function, 1, &raw mut op) })?;
            Ok(op)
        };
        let mut own = OwnOperations { add_int128: create(add_i128)?, ..OwnOperations::default() };
        for (dtype, code, function) in OWN {
            own.ops[usize::from(dtype.code())][code as usize] = create(function)?;
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

/// All plans, once MPI is initialised, and the 128-bit type made for them.
pub(crate) fn plans(mpi: &Mpi) -> Result<(Plans, Handle), MpiFailure> {
    let own = OwnOperations::create(mpi)?;
    Ok((DType::ALL.map(|dtype| CODES.map(|code| own.plan(&mpi.constants, dtype, code))), own.int128))
}

impl OwnOperations {
    /// The plan of one type and reduction.
    fn plan(&self, constants: &Constants, dtype: DType, code: ReductionCode) -> ReductionPlan {
        use ReductionCode::*;
        let datatype = datatype(constants, dtype);
        let small = matches!(dtype, DType::F16 | DType::Bf16 | DType::F8E4M3 | DType::F8E5M2);
        let own = self.ops[usize::from(dtype.code())][code as usize];
        if own != Handle::ZERO {
            return ReductionPlan::Direct { datatype, op: own };
        }
        match code {
            Sum if !small => return ReductionPlan::Direct { datatype, op: constants.sum },
            Prod if !small => return ReductionPlan::Direct { datatype, op: constants.prod },
            // The front asks for them on integers only.
            BitAnd => return ReductionPlan::Direct { datatype, op: constants.band },
            BitOr => return ReductionPlan::Direct { datatype, op: constants.bor },
            BitXor => return ReductionPlan::Direct { datatype, op: constants.bxor },
            LogicalAnd | LogicalOr | LogicalXor => {
                let op = match code {
                    LogicalAnd => constants.band,
                    LogicalOr => constants.bor,
                    _ => constants.bxor,
                };
                let accumulated = Accumulated::of_truth(dtype.size());
                return ReductionPlan::Accumulated { datatype, op, accumulated };
            }
            _ => {}
        }
        let accumulated = Accumulated::new(dtype, code);
        match (code, dtype) {
            (Avg, DType::F32 | DType::F64) => {
                ReductionPlan::Divided { datatype, op: constants.sum, accumulated }
            }
            (Avg, DType::I64 | DType::U64) => {
                ReductionPlan::Accumulated { datatype: self.int128, op: self.add_int128, accumulated }
            }
            _ => {
                let datatype = match (code, dtype) {
                    _ if small => constants.float,
                    (Avg, DType::I8 | DType::U8 | DType::I16 | DType::U16) => constants.int32,
                    (Avg, _) => constants.int64,
                    _ => datatype,
                };
                let op = match code {
                    Prod => constants.prod,
                    // Of 8-bit and 16-bit integers.
                    PreMulSum if self.ops[usize::from(dtype.code())][Sum as usize] != Handle::ZERO => {
                        self.ops[usize::from(dtype.code())][Sum as usize]
                    }
                    _ => constants.sum,
                };
                ReductionPlan::Accumulated { datatype, op, accumulated }
            }
        }
    }
}
