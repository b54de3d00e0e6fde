//! The same work on the host and on a GPU, and whether the results are the same bits.

use phalanx::Comm;
use phalanx_testkit::scenario::Outcome;
use phalanx_train::device::{Device, Gpu, Number};
use phalanx_train::{Error, Result};

/// A result by its name: the bits of its numbers as f64, which has those of all types exactly.
#[derive(Default)]
pub struct Results(Vec<(String, Vec<u64>)>);

impl Results {
    /// Adds numbers. All NaNs are one.
    pub fn numbers<T: Number>(&mut self, name: impl Into<String>, numbers: &[T]) {
        let bits = |x: &T| if x.to_f64().is_nan() { u64::MAX } else { x.to_f64().to_bits() };
        self.0.push((name.into(), numbers.iter().map(bits).collect()));
    }

    /// Adds what a buffer has.
    pub fn buffer<D: Device, T: Number>(
        &mut self,
        name: impl Into<String>,
        device: &D,
        buffer: &D::Buffer<T>,
    ) -> Result<()> {
        let len = phalanx::Source::len(buffer);
        self.numbers(name, &device.download(&device.view(buffer, 0..len))?);
        Ok(())
    }
}

/// The GPU of a communicator.
pub fn gpu(comm: &Comm) -> Result<Gpu> {
    Gpu::new(comm.cuda_stream().ok_or_else(|| Error::Usage("a rank without a GPU".into()))?)
}

/// An error that names the first difference.
pub fn compare(on_host: Result<Results>, on_gpu: Result<Results>) -> Outcome {
    let text = |place: &'static str| move |error: Error| format!("on the {place}: {error}");
    let (on_host, on_gpu) = (on_host.map_err(text("host"))?.0, on_gpu.map_err(text("GPU"))?.0);
    assert_eq!(on_host.len(), on_gpu.len(), "results");
    for ((name, host), (_, gpu)) in on_host.iter().zip(&on_gpu) {
        assert_eq!(host.len(), gpu.len(), "{name}");
        if let Some(at) = (0..host.len()).find(|at| host[*at] != gpu[*at]) {
            let [host, gpu] = [host[at], gpu[at]].map(f64::from_bits);
            return Err(format!("{name}: number {at} is {host:e} on the host and {gpu:e} on the GPU"));
        }
    }
    Ok(String::new())
}

/// Runs the generic function `$body(&comm, &device)` on both devices.
macro_rules! on_both {
    ($($body:ident),*) => {
        /// What ranks do, by name.
        pub const SCENARIOS: &[phalanx_testkit::Scenario] = &[$(
            phalanx_testkit::Scenario::rank(stringify!($body), |comm, _| {
                use phalanx_train::device::Host;
                let gpu = $crate::same::gpu(&comm).map_err(|error| error.to_string())?;
                $crate::same::compare($body(&comm, &Host), $body(&comm, &gpu))
            })
        ),*];
    };
}
pub(crate) use on_both;
