//! A network of linear layers with its forward and backward.

use crate::{Options, Result};
use phalanx::bf16;
use phalanx::cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use phalanx_train::device::{Device, Gpu};
use phalanx_train::tensor::{Products, Slabs};
use std::rc::Rc;

/// A linear layer: weights of `[outputs, inputs]`.
pub struct Layer {
    pub name: String,
    pub shape: [usize; 2],
    /// Whether its outputs are queries, keys and values, of which the values go on.
    is_attention: bool,
}

impl Layer {
    pub fn len(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// The same on every rank.
    pub fn initial(&self) -> impl Iterator<Item = f32> {
        let scale = (3.0 / self.shape[1] as f32).sqrt();
        (0..self.len()).map(move |at| scale * noise(at))
    }
}

/// Between -1 and 1.
fn noise(number: usize) -> f32 {
    let x = (number as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((x ^ (x >> 29)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

pub type Activations = Rc<CudaSlice<bf16>>;

/// Computes a gradient of weights, to where it is told.
pub type Compute<'a> = dyn Fn(&mut CudaViewMut<'_, bf16>) -> Result<()> + 'a;

/// Blocks of four layers, and the head by itself. All matrices are row by row.
pub struct Network {
    pub gpu: Gpu,
    rows: usize,
    pub units: Vec<Vec<Layer>>,
    pub input: Activations,
    pub gradient_of_output: Activations,
}

impl Network {
    pub fn new(gpu: &Gpu, options: &Options, rank: usize) -> Result<Network> {
        let Options { width, blocks, vocabulary, rows, .. } = *options;
        let layer = |unit: usize, name: &str, shape, is_attention| Layer {
            name: format!("{unit:02}.{name}"),
            shape,
            is_attention,
        };
        let block = |unit| {
            vec![
                layer(unit, "attention", [3 * width, width], true),
                layer(unit, "projection", [width, width], false),
                layer(unit, "up", [4 * width, width], false),
                layer(unit, "down", [width, 4 * width], false),
            ]
        };
        let mut units: Vec<Vec<Layer>> = (0..blocks).map(block).collect();
        units.push(vec![layer(blocks, "head", [vocabulary, width], false)]);
        // Random numbers, repeated.
        let random = |len: usize, scale: f32| -> Result<Activations> {
            let count = len.min(1 << 24);
            let noise = |at| bf16::from_f32(scale * noise(at + rank * count));
            let numbers = gpu.upload(&(0..count).map(noise).collect::<Vec<bf16>>())?;
            let mut all = gpu.alloc::<bf16>(len)?;
            for start in (0..len).step_by(count) {
                let end = len.min(start + count);
                gpu.convert(&numbers.slice(..end - start), &mut all.slice_mut(start..end))?;
            }
            Ok(Rc::new(all))
        };
        let (input, gradient) = (random(rows * width, 1.0)?, random(rows * vocabulary, 1.0 / rows as f32)?);
        Ok(Network { gpu: gpu.clone(), rows, units, input, gradient_of_output: gradient })
    }

    pub fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.units.iter().flatten()
    }

    /// A unit's output. The inputs of its layers are kept.
    pub fn forward(
        &self,
        unit: usize,
        weights: &[CudaView<'_, bf16>],
        mut x: Activations,
        kept: &mut Vec<Activations>,
    ) -> Result<Activations> {
        let (gpu, rows) = (&self.gpu, self.rows);
        for (Layer { shape: [outputs, inputs], is_attention, .. }, weight) in
            self.units[unit].iter().zip(weights)
        {
            let mut y = gpu.alloc::<bf16>(rows * outputs)?;
            let size = [rows, *inputs, *outputs];
            gpu.product(size, [false, true], &x.as_view(), weight, &mut y.as_view_mut(), false)?;
            if *is_attention {
                let mut values = gpu.alloc::<bf16>(rows * inputs)?;
                let from = y.slice(2 * inputs..);
                gpu.copy_rows(rows, *inputs, &from, *outputs, &mut values.as_view_mut(), *inputs)?;
                y = values;
            }
            kept.push(x);
            x = Rc::new(y);
        }
        Ok(x)
    }

    /// The gradient of a unit's input, from that of its output. `take` is told a layer's number in the unit, how to compute the gradient of
    /// its weights, and does so.
    pub fn backward(
        &self,
        unit: usize,
        weights: &[CudaView<'_, bf16>],
        mut dy: Activations,
        kept: &mut Vec<Activations>,
        mut take: impl FnMut(usize, &Compute<'_>) -> Result<()>,
    ) -> Result<Activations> {
        let (gpu, rows) = (&self.gpu, self.rows);
        for (at, layer) in self.units[unit].iter().enumerate().rev() {
            let [outputs, inputs] = layer.shape;
            if layer.is_attention {
                let mut all = gpu.zeros::<bf16>(rows * outputs)?;
                let mut values = all.slice_mut(2 * inputs..);
                gpu.copy_rows(rows, inputs, &dy.as_view(), inputs, &mut values, outputs)?;
                dy = Rc::new(all);
            }
            let x = kept.pop().expect("kept by the forward");
            take(at, &|to| {
                let size = [outputs, rows, inputs];
                Ok(gpu.product(size, [true, false], &dy.as_view(), &x.as_view(), to, false)?)
            })?;
            // Nobody asks for the gradient of the network's input.
            if (unit, at) != (0, 0) {
                let mut dx = gpu.alloc::<bf16>(rows * inputs)?;
                let size = [rows, outputs, inputs];
                gpu.product(size, [false; 2], &dy.as_view(), &weights[at], &mut dx.as_view_mut(), false)?;
                dy = Rc::new(dx);
            }
        }
        Ok(dy)
    }
}
