//! [`Bitwise`] and [`Logical`]: reductions of integers.

use super::dtype::Integer;
use super::op::{Reduction, ReductionCode};

/// A reduction of the bits of integers. `MPI_BAND`, `MPI_BOR`, `MPI_BXOR`.
///
/// Host memory only, on every backend.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let mut bits = [1u64 << comm.rank(), 7];
///     comm.all_reduce_in_place(&mut bits, phalanx::Bitwise::Or)?;
///     assert_eq!(bits, [0b111, 7]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bitwise {
    /// Bits that all ranks have set.
    And,
    /// Bits that any rank has set.
    Or,
    /// Bits that an odd number of ranks have set.
    Xor,
}

/// A reduction of the truth of integers: 0 is false, all else is true. The result is 0 or 1. `MPI_LAND`, `MPI_LOR`, `MPI_LXOR`.
///
/// Host memory only, on every backend.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::Logical;
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let has_converged = comm.rank() > 0;
///     assert_eq!(comm.all_reduce_value(u8::from(has_converged), Logical::And)?, 0);
///     assert_eq!(comm.all_reduce_value(comm.rank() as i32 - 1, Logical::Or)?, 1);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Logical {
    /// Whether all are true.
    And,
    /// Whether any is true.
    Or,
    /// Whether an odd number is true.
    Xor,
}

impl<T: Integer> From<Bitwise> for Reduction<T> {
    fn from(op: Bitwise) -> Self {
        Reduction::of(match op {
            Bitwise::And => ReductionCode::BitAnd,
            Bitwise::Or => ReductionCode::BitOr,
            Bitwise::Xor => ReductionCode::BitXor,
        })
    }
}

impl<T: Integer> From<Logical> for Reduction<T> {
    fn from(op: Logical) -> Self {
        Reduction::of(match op {
            Logical::And => ReductionCode::LogicalAnd,
            Logical::Or => ReductionCode::LogicalOr,
            Logical::Xor => ReductionCode::LogicalXor,
        })
    }
}
