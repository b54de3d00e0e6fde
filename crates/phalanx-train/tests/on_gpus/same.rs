//! The same work on the host and on a GPU, and whether the results are the same bits.

use phalanx::Comm;
use phalanx_testkit::scenario::Outcome;
use phalanx_train::device::{Device, Gpu, Number};
use phalanx_train::{Error, Result};

/// Results of a part, in order.
#[derive(Default)]
pub struct Results(Vec<Entry>);

struct Entry {
    name: String,
    /// As f64, which has the numbers of all types exactly.
    numbers: Vec<f64>,
    /// How far they may differ, relative to their size, and to 1 where they are smaller.
    tolerance: f64,
}

impl Results {
    /// Adds numbers that have the same bits on both; all NaNs are one.
    pub fn numbers<T: Number>(&mut self, name: impl Into<String>, numbers: &[T]) {
        self.near(name, numbers, 0.0);
    }

    /// Adds numbers that are sums in another order, or of other exponentials.
    pub fn near<T: Number>(&mut self, name: impl Into<String>, numbers: &[T], tolerance: f64) {
        let numbers = numbers.iter().map(|x| x.to_f64()).collect();
        self.0.push(Entry { name: name.into(), numbers, tolerance });
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
    Gpu::new(comm.cuda_stream()?)
}

/// An error that names the first difference.
pub fn compare(on_host: Result<Results>, on_gpu: Result<Results>) -> Outcome {
    let text = |place: &'static str| move |error: Error| format!("on the {place}: {error}");
    let (on_host, on_gpu) = (on_host.map_err(text("host"))?.0, on_gpu.map_err(text("GPU"))?.0);
    assert_eq!(on_host.len(), on_gpu.len(), "results");
    for (host, gpu) in on_host.iter().zip(&on_gpu) {
        let Entry { name, numbers, tolerance } = host;
        assert_eq!(numbers.len(), gpu.numbers.len(), "{name}");
        let is_same = |a: f64, b: f64| {
            a.to_bits() == b.to_bits()
                || a.is_nan() && b.is_nan()
                || *tolerance > 0.0 && (a - b).abs() <= tolerance * a.abs().max(1.0)
        };
        let differs = |(_, (host, gpu)): &(usize, (&f64, &f64))| !is_same(**host, **gpu);
        if let Some((at, (host, gpu))) = numbers.iter().zip(&gpu.numbers).enumerate().find(differs) {
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
