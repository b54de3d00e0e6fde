//! Safetensors files of distributed tensors.

use super::part::ArrayPart;
use super::replace::NewFile;
use super::{bytes_of, places};
use crate::api::checks::same_len;
use crate::api::comm::Comm;
use crate::types::dtype::{DType, Element};
use crate::types::error::{Result, UsageError};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// A tensor that is distributed over the ranks, to be written: its name and shape, and what this rank has of it.
#[derive(Debug, Clone)]
pub struct TensorPart<'a> {
    name: &'a str,
    shape: &'a [usize],
    part: &'a ArrayPart,
    dtype: DType,
    bytes: &'a [u8],
}

impl<'a> TensorPart<'a> {
    /// `part` says which elements of the flat tensor are in `data`.
    ///
    /// # Errors
    /// [`UsageError::Length`](crate::UsageError::Length) if `data` has another length than the part, or the part is of an array of another
    /// length than the shape's.
    pub fn new<T: Element>(
        name: &'a str,
        shape: &'a [usize],
        part: &'a ArrayPart,
        data: &'a [T],
    ) -> Result<TensorPart<'a>> {
        same_len("TensorPart::new", "data", data.len(), part.len(), "the elements of the part")?;
        let whole = shape.iter().try_fold(1usize, |whole, len| whole.checked_mul(*len)).unwrap_or(usize::MAX);
        same_len("TensorPart::new", "part's whole", part.whole_len(), whole, "the product of the shape")?;
        Ok(TensorPart { name, shape, part, dtype: T::DTYPE, bytes: bytes_of(data) })
    }

    fn info(&self, start: usize) -> TensorInfo {
        let end = start + self.part.whole_len() * self.dtype.size();
        TensorInfo { dtype: dtype_of(self.dtype), shape: self.shape.to_vec(), data_offsets: (start, end) }
    }
}

impl Comm {
    /// Writes tensors that are distributed over the ranks to one safetensors file, which any reader of the format can read. As
    /// [`write_at_all`](Comm::write_at_all) in all else.
    ///
    /// Collective, with the same tensors in the same order on every rank. Tensors of more than 8-byte elements first keep all aligned.
    ///
    /// # Errors
    /// As for `write_at_all`; [`UsageError::Setting`](crate::UsageError::Setting), on all ranks, if their tensors differ, or two have one name.
    pub fn write_tensors_at_all(&self, path: impl AsRef<Path>, tensors: &[TensorPart<'_>]) -> Result<()> {
        let path = path.as_ref();
        let header = header(tensors);
        let hashes = self.all_gather_value(header.as_ref().map_or(0, |header| hash(header)))?;
        let header = header?;
        if let Some(rank) = hashes.iter().position(|other| *other != hashes[self.rank()]) {
            let (name, value) =
                ("write_tensors_at_all: tensors".into(), format!("other tensors on rank {rank}"));
            let expected = "the same names, types and shapes in the same order on all ranks".into();
            return Err(UsageError::Setting { name, value, expected }.into());
        }
        for tensor in tensors {
            self.check_parts("write_tensors_at_all", tensor.part, tensor.dtype.size())?;
        }
        let data: usize = tensors.iter().map(|tensor| tensor.part.whole_len() * tensor.dtype.size()).sum();
        let mut start = header.len() as u64;
        let mut new = NewFile::create(self, path, start + data as u64)?;
        // One rank has all of the header.
        let own = if self.rank() == 0 { &header[..] } else { &[] };
        let mut written = new.file.write(std::iter::once(0..own.len() as u64), 0..start, own)?;
        for TensorPart { part, dtype, bytes, .. } in tensors {
            let end = start + (part.whole_len() * dtype.size()) as u64;
            let done = new.file.write(places(start, part, dtype.size()), start..end, bytes)?;
            written = written.and(done);
            start = end;
        }
        new.finish(written)
    }

    /// Reads a part of a tensor from a safetensors file, of [`write_tensors_at_all`](Comm::write_tensors_at_all) or another writer.
    ///
    /// Collective; the parts may have elements in common, and need not be the whole.
    ///
    /// # Errors
    /// As for [`read_at_all`](Comm::read_at_all); a file without this tensor, or with one of another type or length, is a
    /// [`SystemError`](crate::SystemError).
    pub fn read_tensor_at_all<T: Element>(
        &self,
        path: impl AsRef<Path>,
        name: &str,
        part: &ArrayPart,
        data: &mut [T],
    ) -> Result<()> {
        let path = path.as_ref();
        same_len("read_tensor_at_all", "data", data.len(), part.len(), "the elements of the part")?;
        let found = File::open(path).and_then(|mut file| {
            let start = find(&mut file, name, dtype_of(T::DTYPE), part.whole_len())?;
            Ok((file, start))
        });
        let start = found.as_ref().map_or(0, |(_, start)| *start);
        self.read_part(path, found.map(|(file, _)| file), start, part, data)
    }
}

/// Where a tensor of this type and length begins in a file.
fn find(file: &mut File, name: &str, dtype: Dtype, len: usize) -> io::Result<u64> {
    let bytes = file.metadata()?.len();
    let mut header = [0u8; 8];
    file.read_exact(&mut header)?;
    let header_len = u64::from_le_bytes(header);
    let wrong = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    if header_len > bytes.saturating_sub(8) {
        return Err(wrong(format!("it is no safetensors file: {header_len} bytes of header in {bytes}")));
    }
    let mut header = vec![0u8; header_len as usize];
    file.read_exact(&mut header)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| wrong(format!("it is no safetensors file: {error}")))?;
    let info = metadata.info(name).ok_or_else(|| {
        let names: Vec<String> = metadata.tensors().into_keys().collect();
        wrong(format!("it has no tensor {name:?}, but {names:?}"))
    })?;
    let has = info.shape.iter().try_fold(1usize, |has, len| has.checked_mul(*len)).unwrap_or(usize::MAX);
    if info.dtype != dtype || has != len {
        return Err(wrong(format!(
            "tensor {name:?} has {has} elements of type {:?}, not {len} of {dtype:?}",
            info.dtype
        )));
    }
    let (start, end) = info.data_offsets;
    let (data, wanted) = (8 + header_len, len * dtype.bitsize() / 8);
    if end.checked_sub(start) != Some(wanted) || end as u64 > bytes - data {
        return Err(wrong(format!(
            "tensor {name:?} is not where it says: bytes {start} to {end} of {}, for {wanted}",
            bytes - data
        )));
    }
    Ok(data + start as u64)
}

/// What is at the beginning of a file with these tensors.
fn header(tensors: &[TensorPart<'_>]) -> Result<Vec<u8>> {
    let mut start = 0;
    let infos = tensors.iter().map(|tensor| {
        let info = tensor.info(start);
        start = info.data_offsets.1;
        (tensor.name.to_owned(), info)
    });
    let json = Metadata::new(None, infos.collect())
        .map_err(|error| error.to_string())
        .and_then(|metadata| serde_json::to_vec(&metadata).map_err(|error| error.to_string()));
    let mut json = json.map_err(|error| {
        let (name, expected) =
            ("write_tensors_at_all: tensors".into(), "tensors with names of their own".into());
        UsageError::Setting { name, value: error, expected }
    })?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    Ok(header)
}

/// FNV-1a; never 0, which stands for no header.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step) | 1
}

/// The name of a type in files.
fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::I8 => Dtype::I8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::U8 => Dtype::U8,
        DType::Plain(_) => unreachable!("an `Element` is a number"),
    }
}
