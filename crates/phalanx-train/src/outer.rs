//! Ranks that train by themselves for many steps and then agree: local SGD, and DiLoCo (Douillard et al. 2023).
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::optimizer::Sgd;
//! use phalanx_train::outer::Outer;
//!
//! let results = phalanx::try_run(2, |comm| {
//!     let mut parameters = vec![1.0f64];
//!     let mut outer = Outer::new(&Host, &&parameters[..], Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 })?;
//!     parameters[0] = [0.8, 0.6][comm.rank()]; // what some hundred steps of the inner optimizer came to
//!     outer.synchronize(&comm, &mut parameters)?;
//!     Ok::<_, phalanx_train::Error>(parameters[0])
//! })?;
//! assert!(results.iter().all(|result| (result - 0.7).abs() < 1e-12));
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! The result is not that of training in step. The *outer gradient* is the way from the mean of the ranks' parameters back to where all
//! of them began; an outer optimizer makes a step of it. With rate 1 and no momentum the ranks' parameters are averaged (local SGD).
//! DiLoCo takes Nesterov's momentum of 0.9 and a rate of 0.7, with AdamW inside and some hundred steps between. The inner
//! optimizer's state stays with each rank.

use crate::device::{Device, Number};
use crate::optimizer::{ElementWise, Sgd};
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Source};

/// The parameters that all ranks had last, and the outer momentum.
#[derive(Debug)]
pub struct Outer<D: Device, M: Number> {
    device: D,
    optimizer: Sgd,
    agreed: D::Buffer<M>,
    momentum: D::Buffer<M>,
}

impl<D: ElementWise, M: Number> Outer<D, M> {
    /// Begins at these parameters, the same on every rank. No rank is asked.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(device: &D, parameters: &D::View<'_, M>, optimizer: Sgd) -> Result<Outer<D, M>> {
        let len = parameters.len();
        let mut agreed = device.alloc(len)?;
        device.convert(parameters, &mut device.view_mut(&mut agreed, 0..len))?;
        Ok(Outer { device: device.clone(), optimizer, agreed, momentum: device.zeros(len)? })
    }

    /// Makes an outer step, and sets `parameters` to its result on every rank. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] if `parameters` has another length than at first. Errors of `comm` and of the device.
    pub fn synchronize(&mut self, comm: &Comm, parameters: &mut D::Buffer<M>) -> Result<()> {
        let (device, len) = (&self.device, self.agreed.len());
        if parameters.len() != len {
            return Err(Error::usage(format!(
                "{} parameters, and {len} when the outer optimizer was made: give the same ones",
                parameters.len()
            )));
        }
        // The outer gradient, in place of the parameters.
        let mut parameters = device.view_mut(parameters, 0..len);
        device.scale(&mut parameters, -1.0)?;
        device.add(1.0, &device.view(&self.agreed, 0..len), &mut parameters)?;
        comm.all_reduce_in_place(&mut parameters, ReduceOp::Avg)?;
        let mut agreed = device.view_mut(&mut self.agreed, 0..len);
        let mut momentum = device.view_mut(&mut self.momentum, 0..len);
        device.sgd(&self.optimizer, &D::reborrow(&parameters), &mut agreed, &mut momentum)?;
        device.convert(&D::reborrow(&agreed), &mut parameters)
    }

    /// The agreed parameters and the momentum, for checkpoints; the same on every rank.
    pub fn state(&mut self) -> [&mut D::Buffer<M>; 2] {
        [&mut self.agreed, &mut self.momentum]
    }
}
