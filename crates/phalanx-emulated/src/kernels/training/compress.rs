//! Numbers as bytes (`compress.cu`).

use super::Task;
use super::memory::Parameters;
use super::number::{Number, of_type};
use crate::base::call::Code;
use float8::F8E4M3;

fn code(fp8: bool, x: f32) -> u8 {
    if fp8 {
        return F8E4M3::from_f32(x).to_bits();
    }
    (x.round_ties_even().clamp(-127.0, 127.0) as i8).cast_unsigned()
}

fn number(fp8: bool, code: u8) -> f32 {
    if fp8 { F8E4M3::from_bits(code).to_f32() } else { f32::from(code.cast_signed()) }
}

fn quantize<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (fp8, blocks, block) = (given.value::<u32>(0)? != 0, given.value(1)?, given.value::<usize>(2)?);
    let len = blocks * block;
    let (from, bytes) = (given.buffer::<T>(3, len)?, given.buffer::<u8>(4, len)?);
    let scales = given.buffer::<f32>(5, blocks)?;
    Ok(Box::new(move || {
        let (mut coded, mut scaled) = (Vec::new(), Vec::new());
        for block in from.read().chunks_exact(block) {
            let sizes = block.iter().map(|x| (x.wide() as f32).abs());
            let most = sizes.fold(0.0f32, |most, x| if x.is_finite() { most.max(x) } else { f32::INFINITY });
            let scale = if most.is_finite() { most / if fp8 { 448.0 } else { 127.0 } } else { f32::NAN };
            let inverse = if scale > 0.0 { 1.0 / f64::from(scale) } else { 0.0 };
            coded.extend(block.iter().map(|x| code(fp8, (x.wide() * inverse) as f32)));
            scaled.push(scale);
        }
        bytes.write(&coded);
        scales.write(&scaled);
    }))
}

fn sum_quantized<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let fp8 = given.value::<u32>(0)? != 0;
    let [ranks, len, block]: [usize; 3] = [given.value(1)?, given.value(2)?, given.value(3)?];
    let (factor, bytes) = (given.value::<f64>(4)?, given.buffer::<u8>(5, ranks * len)?);
    let (scales, to) = (given.buffer::<f32>(6, ranks * len / block)?, given.buffer::<T>(7, len)?);
    Ok(Box::new(move || {
        let (bytes, scales) = (bytes.read(), scales.read());
        let sum = |at: usize| {
            let places = (0..ranks).map(|rank| rank * len + at);
            places.fold(-0.0f32, |sum, i| sum + scales[i / block] * number(fp8, bytes[i]))
        };
        to.write(&(0..len).map(|at| T::down(factor * f64::from(sum(at)))).collect::<Vec<T>>());
    }))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    match name.rsplit_once('_')? {
        ("quantize", dtype) => of_type!(dtype, T => quantize::<T>(given)),
        ("sum_quantized", dtype) => of_type!(dtype, T => sum_quantized::<T>(given)),
        _ => None,
    }
}
