//! Steps of the optimizers (`optimizer.cu`).

use super::Task;
use super::memory::Parameters;
use super::number::{Number, Real, of_type};
use crate::base::call::Code;

fn adamw<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let step: [f64; 8] = given.value(0)?;
    let len = given.value(5)?;
    let gradient = given.buffer::<T>(1, len)?;
    let (parameters, first, second) =
        (given.buffer::<T>(2, len)?, given.buffer::<T>(3, len)?, given.buffer::<T>(4, len)?);
    let [decay, length, root, beta1, beta2, rest1, rest2, epsilon] = step.map(T::Real::of);
    Ok(Box::new(move || {
        let (mut ps, mut ms, mut vs) = (parameters.read(), first.read(), second.read());
        for (i, g) in gradient.read().into_iter().enumerate() {
            let g: T::Real = g.up();
            let m = beta1 * ms[i].up() + rest1 * g;
            let v = beta2 * vs[i].up() + rest2 * g * g;
            (ms[i], vs[i]) = (T::down(m.wide()), T::down(v.wide()));
            let p: T::Real = ps[i].up();
            ps[i] = T::down((p * decay - length * m / (v.sqrt() / root + epsilon)).wide());
        }
        first.write(&ms);
        second.write(&vs);
        parameters.write(&ps);
    }))
}

fn sgd<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [length, part, decay, nesterov]: [f64; 4] = given.value(0)?;
    let nesterov = nesterov != 0.0;
    let len = given.value(4)?;
    let gradient = given.buffer::<T>(1, len)?;
    let (parameters, momentum) = (given.buffer::<T>(2, len)?, given.buffer::<T>(3, len)?);
    let [length, part, decay] = [length, part, decay].map(T::Real::of);
    Ok(Box::new(move || {
        let (mut ps, mut bs) = (parameters.read(), momentum.read());
        for (i, g) in gradient.read().into_iter().enumerate() {
            let p: T::Real = ps[i].up();
            let g = g.up::<T::Real>() + decay * p;
            let b = part * bs[i].up() + g;
            bs[i] = T::down(b.wide());
            ps[i] = T::down((p - length * if nesterov { g + part * b } else { b }).wide());
        }
        momentum.write(&bs);
        parameters.write(&ps);
    }))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    match name.split_once('_')? {
        ("adamw", dtype) => of_type!(dtype, T => adamw::<T>(given)),
        ("sgd", dtype) => of_type!(dtype, T => sgd::<T>(given)),
        _ => None,
    }
}
