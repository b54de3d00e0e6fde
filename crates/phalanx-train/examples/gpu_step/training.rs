//! Steps of training, with communication or the same without.

use crate::Result;
use crate::network::{Compute, Layer, Network};
use phalanx::cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use phalanx::{Comm, bf16};
use phalanx_train::buckets::{Gradient, GradientBuckets, Parameter, Settings, SlotValues};
use phalanx_train::device::{Device, Gpu, Number};
use phalanx_train::optimizer::{AdamW, Optimizer, Piece};
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};

pub trait Training {
    fn network(&self) -> &Network;
    fn step(&mut self, comm: &Comm, communicates: bool) -> Result<()>;
}

/// Small steps: the numbers matter to nobody.
fn adam() -> AdamW {
    AdamW::new(1e-5)
}

/// The type of master weights, moments and sums of gradients.
pub trait Master: Number {
    const IS_F32: bool;
    fn slot(values: SlotValues<'_, Gpu>) -> CudaViewMut<'_, Self>;
    fn gradient(gradient: Gradient<'_, Gpu>) -> CudaView<'_, Self>;
    /// Puts a gradient there.
    fn put(gpu: &Gpu, to: &mut CudaViewMut<'_, Self>, compute: &Compute<'_>) -> Result<()>;
}

impl Master for f32 {
    const IS_F32: bool = true;

    fn slot(values: SlotValues<'_, Gpu>) -> CudaViewMut<'_, f32> {
        let SlotValues::F32(values) = values else { unreachable!("summed in f32") };
        values
    }

    fn gradient(gradient: Gradient<'_, Gpu>) -> CudaView<'_, f32> {
        let Gradient::F32(gradient) = gradient else { unreachable!("summed in f32") };
        gradient
    }

    fn put(gpu: &Gpu, to: &mut CudaViewMut<'_, f32>, compute: &Compute<'_>) -> Result<()> {
        let mut gradient = gpu.alloc::<bf16>(to.len())?;
        compute(&mut gradient.as_view_mut())?;
        Ok(gpu.convert(&gradient.as_view(), to)?)
    }
}

impl Master for bf16 {
    const IS_F32: bool = false;

    fn slot(values: SlotValues<'_, Gpu>) -> CudaViewMut<'_, bf16> {
        let SlotValues::Bf16(values) = values else { unreachable!("summed in bf16") };
        values
    }

    fn gradient(gradient: Gradient<'_, Gpu>) -> CudaView<'_, bf16> {
        let Gradient::Bf16(gradient) = gradient else { unreachable!("summed in bf16") };
        gradient
    }

    fn put(_gpu: &Gpu, to: &mut CudaViewMut<'_, bf16>, compute: &Compute<'_>) -> Result<()> {
        compute(to)
    }
}

/// Replicated parameters.
pub struct Replicated<M: Master> {
    network: Network,
    buckets: GradientBuckets<Gpu>,
    /// In the order of the layers, as all that follows.
    weights: Vec<CudaSlice<bf16>>,
    /// Master weights and moments.
    states: Vec<[CudaSlice<M>; 3]>,
    /// Gradients that are not sent.
    own: Vec<CudaSlice<M>>,
    steps: u64,
}

impl<M: Master> Replicated<M> {
    pub fn new(comm: &Comm, network: Network) -> Result<Replicated<M>> {
        let gpu = network.gpu.clone();
        let parameter = |layer: &Layer| Parameter::new::<bf16>(&layer.name, layer.len());
        let parameters: Vec<Parameter> = network.layers().map(parameter).collect();
        let settings = Settings { sums_in_f32: M::IS_F32, ..Settings::default() };
        let buckets = GradientBuckets::new(comm, &gpu, &parameters, settings)?;
        let mut made =
            Replicated { network, buckets, weights: vec![], states: vec![], own: vec![], steps: 0 };
        for layer in made.network.layers() {
            let len = layer.len();
            let master = gpu.upload(&layer.initial().map(M::from_f32).collect::<Vec<M>>())?;
            let mut weight = gpu.alloc::<bf16>(len)?;
            gpu.convert(&master.as_view(), &mut weight.as_view_mut())?;
            made.weights.push(weight);
            made.states.push([master, gpu.zeros(len)?, gpu.zeros(len)?]);
            made.own.push(gpu.zeros(len)?);
        }
        Ok(made)
    }
}

impl<M: Master> Training for Replicated<M> {
    fn network(&self) -> &Network {
        &self.network
    }

    fn step(&mut self, comm: &Comm, communicates: bool) -> Result<()> {
        let Replicated { network, buckets, weights, states, own, steps } = self;
        let (gpu, units) = (&network.gpu, network.units.len());
        let views: Vec<_> = weights.iter().map(CudaSlice::as_view).collect();
        let of_unit = |unit: usize| &views[4 * unit..(4 * unit + 4).min(views.len())];
        if communicates {
            buckets.begin(comm, 1.0)?;
        }
        let mut kept = Vec::new();
        let mut x = network.input.clone();
        for unit in 0..units {
            x = network.forward(unit, of_unit(unit), x, &mut kept)?;
        }
        let mut dy = network.gradient_of_output.clone();
        for unit in (0..units).rev() {
            dy = network.backward(unit, of_unit(unit), dy, &mut kept, |at, compute| {
                let name = &network.units[unit][at].name;
                if communicates {
                    M::put(gpu, &mut M::slot(buckets.slot(name)?.values), compute)?;
                    buckets.ready(comm, name)?;
                } else {
                    M::put(gpu, &mut own[4 * unit + at].as_view_mut(), compute)?;
                }
                Ok(())
            })?;
        }
        drop((x, dy));
        if communicates {
            buckets.finish(comm)?;
        }
        *steps += 1;
        // In the order in which the gradients arrive: the last ones travel meanwhile.
        for (number, layer) in network.layers().collect::<Vec<_>>().into_iter().enumerate().rev() {
            let gradient = match communicates {
                true => M::gradient(buckets.gradient(&layer.name)?),
                false => own[number].as_view(),
            };
            let [master, first, second] = &mut states[number];
            let (piece, moments) =
                (Piece::whole(&layer.shape), &mut [first.as_view_mut(), second.as_view_mut()]);
            adam().update(gpu, *steps, &piece, &gradient, &mut master.as_view_mut(), moments)?;
            gpu.convert(&master.as_view(), &mut weights[number].as_view_mut())?;
        }
        Ok(())
    }
}

/// Sharded parameters: a group for each unit.
pub struct Sharded<M: Master> {
    network: Network,
    groups: Vec<ShardedGroup<Gpu, bf16, M>>,
    /// All parameters, for steps without communication.
    all: Vec<CudaSlice<bf16>>,
}

impl<M: Master> Sharded<M> {
    pub fn new(comm: &Comm, network: Network) -> Result<Sharded<M>> {
        let group = |layers: &Vec<Layer>| {
            let shapes: Vec<_> = layers.iter().map(|layer| (&layer.name, layer.shape)).collect();
            let layout = FlatLayout::new(&shapes, comm.world_size())?;
            let mut initial: Vec<M> = layers.iter().flat_map(Layer::initial).map(M::from_f32).collect();
            initial.resize(layout.len(), M::default());
            Ok(ShardedGroup::new(comm, &network.gpu, layout, &initial, &adam())?)
        };
        let groups = network.units.iter().map(group).collect::<Result<_>>()?;
        Ok(Sharded { network, groups, all: vec![] })
    }
}

fn views<'a>(layout: &FlatLayout, flat: &'a CudaSlice<bf16>) -> Vec<CudaView<'a, bf16>> {
    layout.parameters().map(|(_, _, range)| flat.slice(range)).collect()
}

impl<M: Master> Training for Sharded<M> {
    fn network(&self) -> &Network {
        &self.network
    }

    fn step(&mut self, comm: &Comm, communicates: bool) -> Result<()> {
        let Sharded { network, groups, all } = self;
        let (gpu, units) = (&network.gpu, groups.len());
        if !communicates && all.is_empty() {
            for group in groups.iter_mut() {
                all.push(group.gather(comm)?.clone());
                group.release();
            }
        }
        let mut kept = Vec::new();
        let mut x = network.input.clone();
        for unit in 0..units {
            if communicates && unit + 1 < units {
                groups[unit].prefetch(comm)?;
                groups[unit + 1].prefetch(comm)?;
            }
            let layout = groups[unit].layout().clone();
            let parameters = if communicates { groups[unit].gather(comm)? } else { &all[unit] };
            x = network.forward(unit, &views(&layout, parameters), x, &mut kept)?;
            // The head's backward is next.
            if unit + 1 < units {
                groups[unit].release();
            }
        }
        let mut dy = network.gradient_of_output.clone();
        for unit in (0..units).rev() {
            if communicates && unit > 0 {
                groups[unit - 1].prefetch(comm)?;
            }
            let layout = groups[unit].layout().clone();
            let mut gradient = gpu.zeros::<bf16>(layout.len())?;
            let ranges: Vec<_> = layout.parameters().map(|(_, _, range)| range).collect();
            let parameters = if communicates { groups[unit].gather(comm)? } else { &all[unit] };
            dy = network.backward(unit, &views(&layout, parameters), dy, &mut kept, |at, compute| {
                compute(&mut gradient.slice_mut(ranges[at].clone()))
            })?;
            if communicates {
                groups[unit].release();
                groups[unit].reduce_gradient(comm, &gradient.as_view(), Reduction::Mean)?;
            } else {
                groups[unit].take_gradient(&gradient)?;
            }
        }
        drop((x, dy));
        // In the order in which the gradients arrive: the last ones travel meanwhile.
        groups.iter_mut().rev().try_for_each(|group| Ok(group.step(&adam(), 1.0)?))
    }
}
