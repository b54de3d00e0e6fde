//! [`Weights`]: parameters by name, of which a rank reads or makes only its part.

use crate::error::usage;
use crate::ranks::Ranks;
use candle_core::safetensors::{Load, MmapedSafetensors};
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::VarMap;
use phalanx_train::mesh::{Block, Layout, part};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub use phalanx_train::mesh::Init;

/// Parameters by name, for layers that are split: candle-nn's `VarBuilder`, with the rank's part.
///
/// From safetensors files a rank reads only the rows that it has (the files are mapped). For training, parameters are variables of a
/// `VarMap`; their first values depend on the seed, the name and the place in the whole parameter, and so are the same
/// for any number of ranks.
#[derive(Clone)]
pub struct Weights {
    ranks: Ranks,
    origin: Origin,
    prefix: String,
    dtype: DType,
}

#[derive(Clone)]
enum Origin {
    Files(Arc<MmapedSafetensors>),
    Variables { variables: VarMap, seed: u64 },
}

/// A part of a parameter: these rows of a dimension.
#[derive(Debug, Clone)]
pub(crate) struct Slice {
    pub dim: usize,
    pub rows: Range<usize>,
}

impl Weights {
    /// Of safetensors files, converted to `dtype`.
    ///
    /// # Safety
    /// Nobody changes the files while they are mapped: as for candle's `VarBuilder::from_mmaped_safetensors`.
    pub unsafe fn from_files<P: AsRef<Path>>(ranks: &Ranks, files: &[P], dtype: DType) -> Result<Weights> {
        // SAFETY: the caller's contract.
        let files = unsafe { MmapedSafetensors::multi(files) }?;
        Ok(Weights {
            ranks: ranks.clone(),
            origin: Origin::Files(Arc::new(files)),
            prefix: String::new(),
            dtype,
        })
    }

    /// Variables of `variables`, made where they are not there yet.
    pub fn variables(ranks: &Ranks, variables: &VarMap, seed: u64, dtype: DType) -> Weights {
        let origin = Origin::Variables { variables: variables.clone(), seed };
        Weights { ranks: ranks.clone(), origin, prefix: String::new(), dtype }
    }

    /// The parameters whose names begin with this part, and a dot.
    #[must_use]
    pub fn pp(&self, part: impl std::fmt::Display) -> Weights {
        let prefix =
            if self.prefix.is_empty() { part.to_string() } else { format!("{}.{part}", self.prefix) };
        Weights { prefix, ..self.clone() }
    }

    /// The ranks that the layers are split among.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The type of the parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the parameters are.
    pub fn device(&self) -> &Device {
        self.ranks.device()
    }

    /// The same parameters for another group of ranks.
    #[must_use]
    pub fn among(&self, ranks: &Ranks) -> Weights {
        Weights { ranks: ranks.clone(), ..self.clone() }
    }

    fn name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.into() } else { format!("{}.{name}", self.prefix) }
    }

    /// Whether there is such a parameter.
    pub fn contains(&self, name: &str) -> bool {
        let name = self.name(name);
        match &self.origin {
            Origin::Files(files) => files.get(&name).is_ok(),
            Origin::Variables { variables, .. } => {
                variables.data().lock().is_ok_and(|variables| variables.contains_key(&name))
            }
        }
    }

    /// A whole parameter, the same on every rank.
    pub fn get(&self, shape: impl Into<Shape>, name: &str, init: &Init) -> Result<Tensor> {
        self.part(&shape.into(), name, None, init)
    }

    /// This rank's part of a parameter along a dimension: the first ranks have one row more where the ranks do not divide it.
    pub fn split(&self, shape: impl Into<Shape>, name: &str, dim: usize, init: &Init) -> Result<Tensor> {
        let shape = shape.into();
        let whole = *shape.dims().get(dim).ok_or_else(|| {
            usage(format!("{}: dimension {dim} of shape {shape:?} does not exist", self.name(name)))
        })?;
        let rows = part(&(0..whole), self.ranks.world_size(), self.ranks.rank());
        self.rows(&shape, name, dim, rows, init)
    }

    /// These rows of a parameter.
    pub fn rows(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        dim: usize,
        rows: Range<usize>,
        init: &Init,
    ) -> Result<Tensor> {
        self.part(&shape.into(), name, Some(Slice { dim, rows }), init)
    }

    /// Several stretches of a parameter's first dimension, one behind the other.
    pub(crate) fn several_rows(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        stretches: &[Range<usize>],
        init: &Init,
    ) -> Result<Tensor> {
        let shape = shape.into();
        if let [rows] = stretches {
            return self.rows(shape, name, 0, rows.clone(), init);
        }
        let name = self.name(name);
        let make = || {
            let part = |rows: &Range<usize>| {
                let slice = Some(Slice { dim: 0, rows: rows.clone() });
                match &self.origin {
                    Origin::Files(files) => read(files, &name, &shape, slice, self.dtype, self.device()),
                    Origin::Variables { seed, .. } => {
                        make(*seed, &name, &shape, slice, init, self.dtype, self.device())
                    }
                }
            };
            Tensor::cat(&stretches.iter().map(part).collect::<Result<Vec<_>>>()?, 0)
        };
        let mut dims = shape.dims().to_vec();
        dims[0] = stretches.iter().map(Range::len).sum();
        self.variable(&name, &dims, make)
    }

    /// The variable of this name; or the tensor itself, if it is of files.
    fn variable(&self, name: &str, dims: &[usize], make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let Origin::Variables { variables, .. } = &self.origin else { return make() };
        let mut variables = variables.data().lock().expect("no panic with it locked");
        if let Some(variable) = variables.get(name) {
            return expect_shape(name, variable, dims);
        }
        let variable = Var::from_tensor(&make()?)?;
        let tensor = variable.as_tensor().clone();
        variables.insert(name.into(), variable);
        Ok(tensor)
    }

    fn part(&self, shape: &Shape, name: &str, slice: Option<Slice>, init: &Init) -> Result<Tensor> {
        let name = self.name(name);
        let dims = local(shape, slice.as_ref());
        self.variable(&name, &dims, || match &self.origin {
            Origin::Files(files) => read(files, &name, shape, slice, self.dtype, self.device()),
            Origin::Variables { seed, .. } => {
                make(*seed, &name, shape, slice, init, self.dtype, self.device())
            }
        })
    }
}

/// The shape of a part.
fn local(shape: &Shape, slice: Option<&Slice>) -> Vec<usize> {
    let mut dims = shape.dims().to_vec();
    if let Some(slice) = slice {
        dims[slice.dim] = slice.rows.len();
    }
    dims
}

fn expect_shape(name: &str, tensor: &Tensor, dims: &[usize]) -> Result<Tensor> {
    if tensor.dims() == dims {
        return Ok(tensor.clone());
    }
    Err(usage(format!(
        "{name} has the shape {:?}, {dims:?} is expected; it was made for another model or another number of ranks",
        tensor.dims()
    )))
}

/// Reads a parameter's rows from mapped files.
fn read(
    files: &MmapedSafetensors,
    name: &str,
    shape: &Shape,
    slice: Option<Slice>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let view = files.get(name)?;
    if view.shape() != shape.dims() {
        return Err(usage(format!(
            "{name} has the shape {:?} in its file, {:?} is expected",
            view.shape(),
            shape.dims()
        )));
    }
    let Some(Slice { dim, rows }) = slice else { return view.load(device)?.to_dtype(dtype) };
    // Rows of the first dimension lie together: only their pages are read. Of others, each stretch is.
    let inner: usize = shape.dims()[dim + 1..].iter().product();
    let outer: usize = shape.dims()[..dim].iter().product();
    let size = view.data().len() / shape.elem_count().max(1);
    let (stretch, row) = (shape.dims()[dim] * inner * size, inner * size);
    let mut bytes = Vec::with_capacity(outer * rows.len() * row);
    for index in 0..outer {
        let start = index * stretch;
        bytes.extend_from_slice(&view.data()[start + rows.start * row..start + rows.end * row]);
    }
    let dims = local(shape, Some(&Slice { dim, rows }));
    let stored = DType::try_from(view.dtype())?;
    Tensor::from_raw_buffer(&bytes, stored, &dims, device)?.to_dtype(dtype)
}

/// The first values of a parameter's part.
fn make(
    seed: u64,
    name: &str,
    shape: &Shape,
    slice: Option<Slice>,
    init: &Init,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut ranges: Vec<Range<usize>> = shape.dims().iter().map(|len| 0..*len).collect();
    if let Some(slice) = slice {
        ranges[slice.dim] = slice.rows;
    }
    let block = Block { ranges, copy: 0, copies: 1 };
    let values: Vec<f32> = init.fill(seed, name, &Layout::replicated(shape.dims()), &block);
    Tensor::from_vec(values, block.shape(), device)?.to_dtype(dtype)
}
