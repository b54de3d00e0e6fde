//! candle's memory as buffers of phalanx.

use crate::error::usage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Error, Layout, Result};
use phalanx::{AnySource, AnyTarget};
use std::ops::Range;

/// The place of a tensor's elements in its memory.
pub(crate) fn range(operation: &str, layout: &Layout) -> Result<Range<usize>> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(usage(format!(
            "{operation}: the elements of a tensor of shape {:?} with strides {:?} are not one after the other; call contiguous() on it",
            layout.dims(),
            layout.stride()
        )));
    };
    Ok(start..end)
}

fn refused(dtype: DType) -> Error {
    usage(format!(
        "ranks cannot exchange elements of type {}; convert the tensor (to_dtype) to u8, u32, i16, i32, i64, bf16, f16, f32, f64 or \
         f8e4m3",
        dtype.as_str()
    ))
}

pub(crate) fn source<'a>(operation: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<AnySource<'a>> {
    let range = range(operation, layout)?;
    let whole = match storage {
        CpuStorage::U8(elements) => AnySource::from(&elements[..]),
        CpuStorage::U32(elements) => AnySource::from(&elements[..]),
        CpuStorage::I16(elements) => AnySource::from(&elements[..]),
        CpuStorage::I32(elements) => AnySource::from(&elements[..]),
        CpuStorage::I64(elements) => AnySource::from(&elements[..]),
        CpuStorage::BF16(elements) => AnySource::from(&elements[..]),
        CpuStorage::F16(elements) => AnySource::from(&elements[..]),
        CpuStorage::F32(elements) => AnySource::from(&elements[..]),
        CpuStorage::F64(elements) => AnySource::from(&elements[..]),
        CpuStorage::F8E4M3(elements) => AnySource::from(&elements[..]),
        other => return Err(refused(other.dtype())),
    };
    Ok(whole.part(range))
}

pub(crate) fn target<'a>(
    operation: &str,
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<AnyTarget<'a>> {
    let range = range(operation, layout)?;
    let whole = match storage {
        CpuStorage::U8(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::U32(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::I16(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::I32(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::I64(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::BF16(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::F16(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::F32(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::F64(elements) => AnyTarget::from(&mut elements[..]),
        CpuStorage::F8E4M3(elements) => AnyTarget::from(&mut elements[..]),
        other => return Err(refused(other.dtype())),
    };
    Ok(whole.part(range))
}

/// New memory of so many elements, of the type of another.
pub(crate) fn like(storage: &CpuStorage, len: usize) -> Result<CpuStorage> {
    fn zeros<T: Clone + Default>(_: &[T], len: usize) -> Vec<T> {
        vec![T::default(); len]
    }
    Ok(match storage {
        CpuStorage::U8(elements) => CpuStorage::U8(zeros(elements, len)),
        CpuStorage::U32(elements) => CpuStorage::U32(zeros(elements, len)),
        CpuStorage::I16(elements) => CpuStorage::I16(zeros(elements, len)),
        CpuStorage::I32(elements) => CpuStorage::I32(zeros(elements, len)),
        CpuStorage::I64(elements) => CpuStorage::I64(zeros(elements, len)),
        CpuStorage::BF16(elements) => CpuStorage::BF16(zeros(elements, len)),
        CpuStorage::F16(elements) => CpuStorage::F16(zeros(elements, len)),
        CpuStorage::F32(elements) => CpuStorage::F32(zeros(elements, len)),
        CpuStorage::F64(elements) => CpuStorage::F64(zeros(elements, len)),
        CpuStorage::F8E4M3(elements) => CpuStorage::F8E4M3(zeros(elements, len)),
        _ => return Err(refused(storage.dtype())),
    })
}

/// The same for tensors on a GPU.
#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    use super::{range, refused};
    use candle_core::backend::BackendStorage;
    use candle_core::cuda_backend::CudaStorageSlice;
    use candle_core::{CudaStorage, Layout, Result};
    use phalanx::{AnySource, AnyTarget};

    pub(crate) fn source<'a>(
        operation: &str,
        storage: &'a CudaStorage,
        layout: &Layout,
    ) -> Result<AnySource<'a>> {
        let range = range(operation, layout)?;
        let whole = match &storage.slice {
            CudaStorageSlice::U8(elements) => AnySource::from(elements),
            CudaStorageSlice::U32(elements) => AnySource::from(elements),
            CudaStorageSlice::I16(elements) => AnySource::from(elements),
            CudaStorageSlice::I32(elements) => AnySource::from(elements),
            CudaStorageSlice::I64(elements) => AnySource::from(elements),
            CudaStorageSlice::BF16(elements) => AnySource::from(elements),
            CudaStorageSlice::F16(elements) => AnySource::from(elements),
            CudaStorageSlice::F32(elements) => AnySource::from(elements),
            CudaStorageSlice::F64(elements) => AnySource::from(elements),
            CudaStorageSlice::F8E4M3(elements) => AnySource::from(elements),
            _ => return Err(refused(storage.dtype())),
        };
        Ok(whole.part(range))
    }

    pub(crate) fn target<'a>(
        operation: &str,
        storage: &'a mut CudaStorage,
        layout: &Layout,
    ) -> Result<AnyTarget<'a>> {
        let (range, dtype) = (range(operation, layout)?, storage.dtype());
        let whole = match &mut storage.slice {
            CudaStorageSlice::U8(elements) => AnyTarget::from(elements),
            CudaStorageSlice::U32(elements) => AnyTarget::from(elements),
            CudaStorageSlice::I16(elements) => AnyTarget::from(elements),
            CudaStorageSlice::I32(elements) => AnyTarget::from(elements),
            CudaStorageSlice::I64(elements) => AnyTarget::from(elements),
            CudaStorageSlice::BF16(elements) => AnyTarget::from(elements),
            CudaStorageSlice::F16(elements) => AnyTarget::from(elements),
            CudaStorageSlice::F32(elements) => AnyTarget::from(elements),
            CudaStorageSlice::F64(elements) => AnyTarget::from(elements),
            CudaStorageSlice::F8E4M3(elements) => AnyTarget::from(elements),
            _ => return Err(refused(dtype)),
        };
        Ok(whole.part(range))
    }

    /// New memory of so many elements, of the type and on the GPU of another.
    pub(crate) fn like(storage: &CudaStorage, len: usize) -> Result<CudaStorage> {
        let device = storage.device.clone();
        // SAFETY: the operation that the memory is for writes all of it, on the stream on which it is allocated, before anybody reads it.
        let slice = unsafe {
            match &storage.slice {
                CudaStorageSlice::U8(_) => CudaStorageSlice::U8(device.alloc(len)?),
                CudaStorageSlice::U32(_) => CudaStorageSlice::U32(device.alloc(len)?),
                CudaStorageSlice::I16(_) => CudaStorageSlice::I16(device.alloc(len)?),
                CudaStorageSlice::I32(_) => CudaStorageSlice::I32(device.alloc(len)?),
                CudaStorageSlice::I64(_) => CudaStorageSlice::I64(device.alloc(len)?),
                CudaStorageSlice::BF16(_) => CudaStorageSlice::BF16(device.alloc(len)?),
                CudaStorageSlice::F16(_) => CudaStorageSlice::F16(device.alloc(len)?),
                CudaStorageSlice::F32(_) => CudaStorageSlice::F32(device.alloc(len)?),
                CudaStorageSlice::F64(_) => CudaStorageSlice::F64(device.alloc(len)?),
                CudaStorageSlice::F8E4M3(_) => CudaStorageSlice::F8E4M3(device.alloc(len)?),
                _ => return Err(refused(storage.dtype())),
            }
        };
        Ok(CudaStorage { slice, device })
    }

    /// Writes zeros.
    pub(crate) fn zero(storage: &mut CudaStorage) -> Result<()> {
        let stream = storage.device.cuda_stream();
        match &mut storage.slice {
            CudaStorageSlice::U8(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::U32(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::I16(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::I32(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::I64(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::BF16(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::F16(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::F32(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::F64(elements) => stream.memset_zeros(elements),
            CudaStorageSlice::F8E4M3(elements) => stream.memset_zeros(elements),
            _ => return Err(refused(storage.dtype())),
        }
        .map_err(|error| candle_core::Error::Cuda(Box::new(error)))
    }
}
