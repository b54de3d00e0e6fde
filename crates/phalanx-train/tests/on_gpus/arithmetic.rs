//! Arithmetic on one GPU: elements, norms, optimizers.

use crate::same::{Results, on_both};
use phalanx::{Comm, bf16, f16};
use phalanx_train::Result;
use phalanx_train::device::{Device, Number};
use phalanx_train::norm::Squares;
use phalanx_train::optimizer::{AdamW, ElementWise, Sgd};

on_both! { elements, optimizers, squares }

/// Lengths around what a thread takes at once, and more than all threads of a launch do.
const LENGTHS: [usize; 6] = [0, 1, 3, 5, 4099, 70_001];

/// Numbers of many sizes, with what is not finite among them.
fn numbers<T: Number>(len: usize, salt: usize) -> Vec<T> {
    let special =
        [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 6e-8, 1e-40, 65_519.0, 65_520.0, 1e39];
    let number = |at: usize| match at + salt {
        at if at % 23 == 7 => special[at / 23 % special.len()],
        at => ((at * 37 + 11) as f64 * 0.618).sin() * 10f64.powi((at % 9) as i32 - 4),
    };
    (0..len).map(|at| T::from_f64(number(at))).collect()
}

/// Bits of NaNs may differ.
fn not_nan<T: Number>(number: T) -> T {
    if number.to_f64().is_nan() { T::default() } else { number }
}

fn elements<D: Device>(_: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    of_pairs::<D, f32>(device, &mut results)?;
    of_pairs::<D, f64>(device, &mut results)?;
    of_pairs::<D, f16>(device, &mut results)?;
    of_pairs::<D, bf16>(device, &mut results)?;
    Ok(results)
}

fn of_pairs<D: Device, A: Number>(device: &D, results: &mut Results) -> Result<()> {
    of_pair::<D, A, f32>(device, results)?;
    of_pair::<D, A, f64>(device, results)?;
    of_pair::<D, A, f16>(device, results)?;
    of_pair::<D, A, bf16>(device, results)?;
    for len in LENGTHS {
        let name = |what: &str| format!("{what} of {len} × {}", A::DTYPE);
        let mut data = device.upload(&numbers::<A>(len + 1, 2))?;
        // Not where a thread could take four at once.
        device.scale(&mut device.view_mut(&mut data, 1..len + 1), 1.0 / 3.0)?;
        results.buffer(name("scale"), device, &data)?;
        device.fill(&mut device.view_mut(&mut data, len / 2..len), 0.1)?;
        results.buffer(name("fill"), device, &data)?;
        results.buffer(name("zeros"), device, &device.zeros::<A>(len)?)?;
    }
    Ok(())
}

fn of_pair<D: Device, A: Number, B: Number>(device: &D, results: &mut Results) -> Result<()> {
    for (len, offset) in LENGTHS.into_iter().zip([0, 1, 2, 0, 3, 0]) {
        let name = |what: &str| format!("{what} of {len} × {} to {}", A::DTYPE, B::DTYPE);
        let from = device.upload(&numbers::<A>(len + offset, 0))?;
        let mut to = device.upload(&numbers::<B>(len + 2, 1))?;
        let (from, range) = (device.view(&from, offset..offset + len), 2..len + 2);
        device.add(0.7, &from, &mut device.view_mut(&mut to, range.clone()))?;
        results.buffer(name("add"), device, &to)?;
        device.convert(&from, &mut device.view_mut(&mut to, range))?;
        results.buffer(name("convert"), device, &to)?;
    }
    Ok(())
}

fn optimizers<D: ElementWise>(_: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    steps::<D, f32>(device, &mut results)?;
    steps::<D, f64>(device, &mut results)?;
    steps::<D, f16>(device, &mut results)?;
    steps::<D, bf16>(device, &mut results)?;
    Ok(results)
}

fn steps<D: ElementWise, M: Number>(device: &D, results: &mut Results) -> Result<()> {
    let (adamw, len) = (AdamW::new(0.01), 5003);
    let number =
        |salt: usize| (0..len).map(|at| M::from_f64(((at * 31 + salt) as f64 * 0.37).sin())).collect();
    let number: &dyn Fn(usize) -> Vec<M> = &number;
    for nesterov in [false, true] {
        let sgd = Sgd { learning_rate: 0.1, momentum: 0.9, nesterov, weight_decay: 0.01 };
        let [mut a, mut b] = [device.upload(&number(0))?, device.upload(&number(0))?];
        let mut states = [device.zeros::<M>(len)?, device.zeros::<M>(len)?, device.zeros::<M>(len)?];
        for step in 1..4 {
            let gradient = device.upload(&number(step as usize))?;
            let gradient = device.view(&gradient, 0..len);
            let [first, second, momentum] = states.each_mut().map(|state| device.view_mut(state, 0..len));
            let [mut first, mut second, mut momentum] = [first, second, momentum];
            let (mut a, mut b) = (device.view_mut(&mut a, 0..len), device.view_mut(&mut b, 0..len));
            device.adamw(&adamw, step, &gradient, &mut a, &mut first, &mut second)?;
            device.sgd(&sgd, &gradient, &mut b, &mut momentum)?;
        }
        results.buffer(format!("AdamW in {}", M::DTYPE), device, &a)?;
        results.buffer(format!("SGD in {}", M::DTYPE), device, &b)?;
        for (at, state) in states.iter().enumerate() {
            results.buffer(format!("state {at} in {}", M::DTYPE), device, state)?;
        }
    }
    Ok(())
}

/// The order of the sum is another one on a GPU, and always the same: whole numbers have the same sum in any order.
fn squares<D: Squares>(_: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    squares_of::<D, f32>(device, &mut results)?;
    squares_of::<D, f64>(device, &mut results)?;
    squares_of::<D, f16>(device, &mut results)?;
    squares_of::<D, bf16>(device, &mut results)?;
    Ok(results)
}

fn squares_of<D: Squares, T: Number>(device: &D, results: &mut Results) -> Result<()> {
    let sum = |numbers: &[T]| -> Result<f64> {
        let (numbers, mut sum) = (device.upload(numbers)?, device.upload(&[0.5f64])?);
        let len = phalanx::Source::len(&numbers);
        device.add_squares(&device.view(&numbers, 0..len), &mut device.view_mut(&mut sum, 0..1))?;
        Ok(device.download(&device.view(&sum, 0..1))?[0])
    };
    let of_lengths = LENGTHS.map(|len| numbers::<T>(len, 4).into_iter().map(not_nan).collect::<Vec<T>>());
    let uploaded = of_lengths.iter().map(|numbers| device.upload(numbers)).collect::<Result<Vec<_>>>()?;
    let views: Vec<_> =
        uploaded.iter().zip(LENGTHS).map(|(buffer, len)| device.view(buffer, 0..len)).collect();
    for sum in device.checksums(&views.iter().collect::<Vec<_>>())? {
        results.numbers(
            format!("halves of a checksum of {}", T::DTYPE),
            &[(sum >> 32) as f64, (sum as u32) as f64],
        );
    }
    for len in LENGTHS {
        let whole: Vec<T> = (0..len).map(|at| T::from_f64((at % 120) as f64 - 60.0)).collect();
        results.numbers(format!("squares of {len} × {}", T::DTYPE), &[sum(&whole)?]);
        let other: Vec<T> = (0..len).map(|at| T::from_f64((at as f64 * 0.37).sin())).collect();
        let exact: f64 = 0.5 + other.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>();
        let here = sum(&other)?;
        assert!((here / exact - 1.0).abs() < 1e-12, "{here} is not {exact}");
        assert_eq!(here.to_bits(), sum(&other)?.to_bits(), "twice the same");
    }
    Ok(())
}
