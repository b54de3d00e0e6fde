//! [`Elements`]: a tensor's elements where phalanx reaches them.

use crate::Ranks;
#[cfg(feature = "cuda")]
use crate::gpu::Collective;
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

/// A tensor's elements, in host memory or on this rank's GPU.
pub(crate) enum Elements {
    Host(TensorData),
    /// A result of arithmetic, whose memory nobody else has.
    #[cfg(feature = "cuda")]
    Gpu(Tensor<1>),
}

impl Elements {
    /// Takes a tensor's elements; those that go to a GPU are multiplied.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "all go to host memory"))]
    pub fn of<const D: usize>(ranks: &Ranks, tensor: Tensor<D>, factor: f64) -> Elements {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &ranks.gpu
            && matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16)
        {
            let tensor = tensor.to_device(&gpu.device);
            return Elements::Gpu(tensor.reshape([-1]).mul_scalar(factor));
        }
        Elements::Host(tensor.into_data())
    }

    /// Those in host memory.
    pub fn into_host(self) -> Option<TensorData> {
        match self {
            Elements::Host(data) => Some(data),
            #[cfg(feature = "cuda")]
            Elements::Gpu(_) => None,
        }
    }

    /// Those in host memory, to change.
    pub fn host_mut(&mut self) -> Option<&mut TensorData> {
        match self {
            Elements::Host(data) => Some(data),
            #[cfg(feature = "cuda")]
            Elements::Gpu(_) => None,
        }
    }

    /// The tensor of these elements.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(unused_variables, reason = "what is in host memory knows its shape")
    )]
    pub fn place<const D: usize>(self, shape: Shape, device: &Device, dtype: DType) -> Tensor<D> {
        match self {
            Elements::Host(data) => {
                let sent = data.dtype();
                Tensor::<D>::from_data(data, (device, sent)).cast(dtype)
            }
            #[cfg(feature = "cuda")]
            Elements::Gpu(tensor) => tensor.reshape(shape).cast(dtype).to_device(device),
        }
    }
}

#[cfg(feature = "cuda")]
impl Ranks {
    /// Carries out a collective on the elements that are on the GPU.
    pub(crate) fn exchange_on_gpu<'a>(
        &self,
        collective: Collective,
        elements: impl IntoIterator<Item = &'a Elements>,
    ) -> crate::Result<()> {
        let Some(gpu) = &self.gpu else { return Ok(()) };
        let on_gpu = |elements: &'a Elements| match elements {
            Elements::Gpu(tensor) => Some(tensor),
            Elements::Host(_) => None,
        };
        gpu.in_place(self.comm(), collective, elements.into_iter().filter_map(on_gpu))
    }
}
