//! Errors of phalanx as candle's, and back.

use candle_core::Error;

/// phalanx's error behind an error of candle: a missing rank, a mismatch, a timeout, and so on. `None` for candle's own errors.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use phalanx_candle::{Ranks, phalanx_error};
///
/// Ranks::try_run(2, |ranks| {
///     let hasty = ranks.within(std::time::Duration::from_millis(50))?;
///     if ranks.rank() == 1 {
///         std::thread::sleep(std::time::Duration::from_millis(500));
///         return Ok(());
///     }
///     let tensor = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
///     let error = hasty.all_reduce_in_place(&tensor, phalanx::ReduceOp::Sum).unwrap_err();
///     assert!(matches!(phalanx_error(&error), Some(phalanx::Error::Timeout(_))));
///     Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn phalanx_error(error: &Error) -> Option<&phalanx::Error> {
    match error {
        Error::Cuda(error) => error.downcast_ref(),
        Error::Context { inner, .. } | Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } => {
            phalanx_error(inner)
        }
        Error::WrappedContext { wrapped, .. } => wrapped.downcast_ref().and_then(phalanx_error),
        _ => None,
    }
}

/// An error of phalanx as candle's. `Cuda` is the one variant that keeps the error itself, whatever the device.
pub(crate) fn failed(error: impl Into<phalanx::Error>) -> Error {
    Error::Cuda(Box::new(error.into()))
}

/// An error of candle, which errors of phalanx become.
pub(crate) struct AnyError(pub Error);

impl From<phalanx::Error> for AnyError {
    fn from(error: phalanx::Error) -> AnyError {
        AnyError(failed(error))
    }
}

/// An error of phalanx-train as candle's.
pub(crate) fn failed_training(error: phalanx_train::Error) -> Error {
    match error {
        phalanx_train::Error::Comm(error) => failed(error),
        other => Error::Cuda(Box::new(other)),
    }
}

/// An argument that makes no sense: what, and what to do. Nothing was sent.
pub(crate) fn usage(text: String) -> Error {
    Error::Msg(text)
}
