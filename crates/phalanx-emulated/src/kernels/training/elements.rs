//! The arithmetic of a device (`elements.cu`).

use super::Task;
use super::memory::Parameters;
use super::number::{Number, Real, of_type};
use crate::base::call::Code;

fn convert<A: Number, B: Number>(given: &Parameters) -> Result<Task, Code> {
    let len = given.value(2)?;
    let (from, to) = (given.buffer::<A>(0, len)?, given.buffer::<B>(1, len)?);
    Ok(Box::new(move || {
        to.write(&from.read().into_iter().map(|x| B::down(x.wide())).collect::<Vec<B>>());
    }))
}

fn add<R: Real, A: Number, B: Number>(given: &Parameters) -> Result<Task, Code> {
    let (factor, len) = (R::of(given.value(0)?), given.value(3)?);
    let (from, to) = (given.buffer::<A>(1, len)?, given.buffer::<B>(2, len)?);
    Ok(Box::new(move || {
        let sums = to.read().into_iter().zip(from.read());
        let sums = sums.map(|(y, x)| B::down((y.up::<R>() + factor * x.up::<R>()).wide()));
        to.write(&sums.collect::<Vec<B>>());
    }))
}

fn scale<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (factor, data) = (T::Real::of(given.value(1)?), given.buffer::<T>(0, given.value(2)?)?);
    Ok(Box::new(move || {
        let scaled = data.read().into_iter().map(|x| T::down((x.up::<T::Real>() * factor).wide()));
        data.write(&scaled.collect::<Vec<T>>());
    }))
}

fn fill<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (value, len) = (T::down(given.value(1)?), given.value(2)?);
    let to = given.buffer::<T>(0, len)?;
    Ok(Box::new(move || to.write(&vec![value; len])))
}

fn of_pair<A: Number>(kernel: &str, to: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    of_type!(to, B => match kernel {
        "convert" => convert::<A, B>(given),
        // In f64 if either is.
        _ if A::SIZE.max(B::SIZE) == 8 => add::<f64, A, B>(given),
        _ => add::<f32, A, B>(given),
    })
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    let (kernel, types) = name.split_once('_')?;
    match kernel {
        "convert" | "add" => {
            let (from, to) = types.split_once('_')?;
            of_type!(from, A => of_pair::<A>(kernel, to, given))?
        }
        "scale" => of_type!(types, T => scale::<T>(given)),
        "fill" => of_type!(types, T => fill::<T>(given)),
        _ => None,
    }
}
