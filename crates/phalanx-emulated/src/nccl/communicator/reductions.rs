//! Reduction operators (`ncclRedOp_t`): the built-in ones, and sums with a factor for each rank.

use crate::arithmetic::{Combine, DataType};
use crate::base::call::{Answer, Code};
use crate::base::handles::Handle;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::memory::Range;
use crate::nccl::result::{INVALID_ARGUMENT, INVALID_USAGE, fail};
use std::collections::BTreeMap;
use std::ffi::c_int;

/// The first operator that is not built in.
const FIRST_CREATED: c_int = 5;

/// How contributions are combined, and this rank's factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    pub combine: Combine,
    pub factor: Factor,
}

/// Where a factor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factor {
    None,
    /// Its bytes, read when the operator was created.
    Value([u8; 8]),
    /// In memory that is read when the operation runs.
    Device(Range),
}

/// The operators that a communicator created. A destroyed one is `None`.
#[derive(Default)]
pub struct Reductions(BTreeMap<c_int, Option<Operator>>);

#[derive(Clone, Copy)]
struct Operator {
    dtype: DataType,
    factor: Factor,
}

impl Reductions {
    /// The reduction of a call with this operator.
    pub fn find(&self, function: &str, operator: c_int, dtype: c_int) -> Result<Reduction, Code> {
        let combine = match operator {
            0 => Combine::Sum,
            1 => Combine::Prod,
            2 => Combine::Max,
            3 => Combine::Min,
            4 => Combine::Avg,
            _ => return self.find_created(function, operator, dtype),
        };
        Ok(Reduction { combine, factor: Factor::None })
    }

    fn find_created(&self, function: &str, operator: c_int, dtype: c_int) -> Result<Reduction, Code> {
        let invalid =
            |why| fail(INVALID_ARGUMENT, format!("{function} : the reduction operator {operator:#x} {why}"));
        match self.0.get(&operator) {
            None => Err(invalid("is none of this communicator")),
            Some(None) => {
                violation(function, "the reduction operator was destroyed by ncclRedOpDestroy before")
            }
            Some(Some(created)) if created.dtype.code() as c_int != dtype => {
                Err(invalid("is for another data type"))
            }
            Some(Some(created)) => Ok(Reduction { combine: Combine::PreMulSum, factor: created.factor }),
        }
    }

    /// Creates an operator for a communicator. As in NCCL, operators of different communicators differ.
    pub fn create(&mut self, communicator: Handle, dtype: DataType, factor: Factor) -> c_int {
        let operator = FIRST_CREATED + (communicator as c_int & 0x3fff_fff0) + self.0.len() as c_int;
        self.0.insert(operator, Some(Operator { dtype, factor }));
        operator
    }

    /// Destroys an operator.
    pub fn destroy(&mut self, function: &str, operator: c_int) -> Answer {
        match self.0.get_mut(&operator).map(Option::take) {
            Some(Some(_)) => Ok(()),
            Some(None) => {
                violation(function, "the reduction operator was destroyed by ncclRedOpDestroy before")
            }
            None => Err(fail(
                INVALID_USAGE,
                format!("{function} : {operator:#x} is no operator of this communicator"),
            )),
        }
    }
}

/// Whether an operator is built in.
pub fn is_built_in(operator: c_int) -> bool {
    (0..FIRST_CREATED).contains(&operator)
}

/// Refuses 8-bit floats on devices of a compute capability below 9.0.
pub fn check_float8() -> Answer {
    if settings().compute_capability >= (9, 0) {
        return Ok(());
    }
    Err(fail(INVALID_ARGUMENT, "FP8 reduction support begins with sm90 capable devices."))
}
