//! What a training costs: the time of a step, a rank's memory, and its communication.
//!
//! ```
//! use phalanx::ReduceOp;
//! use phalanx_train::report::StepTimer;
//!
//! let reports = phalanx::try_run(2, |comm| {
//!     let mut timer = StepTimer::begin();
//!     let mut gradient = vec![1.0f32; 1000]; // computed here
//!     timer.communicating(|| comm.all_reduce_in_place(&mut gradient, ReduceOp::Avg))?;
//!     timer.end(&comm, 0, 32)
//! })?;
//! for report in reports {
//!     assert_eq!(report.samples, 64);
//!     println!("{report}"); // step 0: 1.2 ms, 53333 samples/s, computing 0.9 ms, …
//! }
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! | question | before the training | while it runs |
//! |---|---|---|
//! | where the time goes | | [`StepTimer`], [`StepReport`] |
//! | whether it fits | [`MemoryPlan`] | |
//! | what is sent | [`Traffic`]: one process plays a rank | `phalanx trace` |

mod memory;
mod step;
mod traffic;

pub use memory::{Memory, MemoryPlan, Sharding};
pub use step::{RankStep, StepReport, StepTimer, Straggler};
pub use traffic::{Traffic, TrafficLine};

/// A number of bytes with a unit, for people.
fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in UNITS {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}
