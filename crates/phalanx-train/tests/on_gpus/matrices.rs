//! Products of matrices, and what is made of them: split layers, Muon, PowerSGD. Their sums are in another order on a GPU.

use crate::same::{Results, on_both};
use phalanx::{Comm, bf16, f16};
use phalanx_train::Result;
use phalanx_train::compress::{LowRank, PowerSgd};
use phalanx_train::device::{Device, Number};
use phalanx_train::optimizer::{ElementWise, Matrices, Muon, Optimizer, Piece};
use phalanx_train::tensor::{ColumnParallel, Products, RowParallel};

on_both! { products, split_layers, muon, power_sgd, power_sgd_as_worked_out }

/// Between -1 and 1.
fn numbers<T: Number>(len: usize, salt: usize) -> Vec<T> {
    (0..len).map(|at| T::from_f64(((at * 29 + salt * 101) as f64 * 0.71).sin())).collect()
}

fn read<D: Device, T: Number>(device: &D, buffer: &D::Buffer<T>) -> Result<Vec<T>> {
    device.download(&device.view(buffer, 0..phalanx::Source::len(buffer)))
}

fn products<D: Products>(_: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    products_of::<D, f32>(device, 1e-5, &mut results)?;
    products_of::<D, f64>(device, 1e-13, &mut results)?;
    products_of::<D, f16>(device, 1e-2, &mut results)?;
    products_of::<D, bf16>(device, 1e-1, &mut results)?;
    Ok(results)
}

fn products_of<D: Products, T: Number>(device: &D, tolerance: f64, results: &mut Results) -> Result<()> {
    for size in [[3, 5, 7], [1, 1, 1], [33, 64, 17], [4, 0, 3], [0, 2, 2]] {
        let [m, k, n] = size;
        let (a, b) = (device.upload(&numbers::<T>(m * k, 1))?, device.upload(&numbers::<T>(k * n, 2))?);
        for transposed in [[false, false], [false, true], [true, false], [true, true]] {
            for adds in [false, true] {
                let mut c = device.upload(&numbers::<T>(m * n, 3))?;
                let (a, b) = (device.view(&a, 0..m * k), device.view(&b, 0..k * n));
                device.product(size, transposed, &a, &b, &mut device.view_mut(&mut c, 0..m * n), adds)?;
                let name = format!("{size:?}, transposed {transposed:?}, adds {adds}, of {}", T::DTYPE);
                results.near(name, &read::<D, T>(device, &c)?, tolerance);
            }
        }
    }
    let (rows, columns) = (37, 300);
    let mut to = device.upload(&numbers::<T>(rows * columns, 4))?;
    let mut row = device.upload(&numbers::<T>(columns, 5))?;
    device.add_to_rows(&device.view(&row, 0..columns), &mut device.view_mut(&mut to, 0..rows * columns))?;
    results.buffer(format!("bias in {}", T::DTYPE), device, &to)?;
    device.sum_of_rows(&device.view(&to, 0..rows * columns), &mut device.view_mut(&mut row, 0..columns))?;
    results.buffer(format!("sums of rows in {}", T::DTYPE), device, &row)
}

/// Inputs → split outputs → inputs, and back. Row-parallel: the bias is added once, and its gradient counted once.
fn split_layers<D: Products>(comm: &Comm, device: &D) -> Result<Results> {
    const ROWS: usize = 6;
    const INPUTS: usize = 20;
    const OUTPUTS: usize = 9;
    let mut results = Results::default();
    let upload = |len, salt| device.upload(&numbers::<f32>(len, salt));
    let (own, len) = (comm.rank() + 10, OUTPUTS * INPUTS);
    let bias = Some(upload(OUTPUTS, own + 40)?);
    let up = ColumnParallel { inputs: INPUTS, outputs: OUTPUTS, weight: upload(len, own)?, bias };
    let bias = Some(upload(INPUTS, 3)?);
    let down = RowParallel { inputs: OUTPUTS, outputs: INPUTS, weight: upload(len, own + 20)?, bias };
    let (x, gradient) = (upload(ROWS * INPUTS, 1)?, upload(ROWS * INPUTS, 2)?);
    let x = device.view(&x, 0..ROWS * INPUTS);
    let hidden = up.forward::<D, f32>(device, &x)?;
    let hidden_view = device.view(&hidden, 0..ROWS * OUTPUTS);
    let y = down.forward::<D, f32>(comm, device, &hidden_view)?;
    let of_down = down.backward::<D, f32>(device, &hidden_view, &device.view(&gradient, 0..ROWS * INPUTS))?;
    let of_hidden = device.view(&of_down.input, 0..ROWS * OUTPUTS);
    let of_up = up.backward::<D, f32>(comm, device, &x, &of_hidden)?;
    for (name, buffer) in [
        ("hidden", &hidden),
        ("output", &y),
        ("gradient of the hidden", &of_down.input),
        ("gradient of the second weight", &of_down.weight),
        ("gradient of the input", &of_up.input),
        ("gradient of the first weight", &of_up.weight),
    ] {
        results.near(name, &read::<D, f32>(device, buffer)?, 1e-5);
    }
    for bias in [of_down.bias, of_up.bias].iter().flatten() {
        results.near("gradient of a bias", &read::<D, f32>(device, bias)?, 1e-5);
    }
    Ok(results)
}

fn muon<D: Matrices + ElementWise>(_: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    for shape in [[12, 30], [30, 12], [5, 5]] {
        // Newton–Schulz makes errors larger.
        muon_of::<D, f32>(device, shape, 1e-4, &mut results)?;
        muon_of::<D, f64>(device, shape, 1e-11, &mut results)?;
        muon_of::<D, bf16>(device, shape, 5e-2, &mut results)?;
    }
    Ok(results)
}

fn muon_of<D: Matrices + ElementWise, M: Number>(
    device: &D,
    shape: [usize; 2],
    tolerance: f64,
    results: &mut Results,
) -> Result<()> {
    let (muon, len) = (Muon::new(0.02), shape[0] * shape[1]);
    let (mut parameters, mut momentum) = (device.upload(&numbers::<M>(len, 0))?, device.zeros::<M>(len)?);
    for step in 1..4 {
        let gradient = device.upload(&numbers::<M>(len, step as usize))?;
        let (gradient, piece) = (device.view(&gradient, 0..len), Piece::whole(&shape));
        let states = &mut [device.view_mut(&mut momentum, 0..len)];
        muon.update(device, step, &piece, &gradient, &mut device.view_mut(&mut parameters, 0..len), states)?;
    }
    results.near(format!("{shape:?} in {}", M::DTYPE), &read::<D, M>(device, &parameters)?, tolerance);
    Ok(())
}

fn power_sgd<D: LowRank>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    for rank in 1..=3 {
        power_sgd_of::<D, f32>(comm, device, rank, 1e-3, &mut results)?;
        power_sgd_of::<D, f64>(comm, device, rank, 1e-10, &mut results)?;
    }
    Ok(results)
}

fn power_sgd_of<D: LowRank, M: Number>(
    comm: &Comm,
    device: &D,
    rank: usize,
    tolerance: f64,
    results: &mut Results,
) -> Result<()> {
    const ROWS: usize = 300;
    const COLUMNS: usize = 5;
    let mut power = PowerSgd::<D, M>::new(device, ROWS, COLUMNS, rank, 1)?;
    for step in 0..3 {
        let mut gradient = device.upload(&numbers::<M>(ROWS * COLUMNS, step * 10 + comm.rank()))?;
        power.reduce(comm, &mut device.view_mut(&mut gradient, 0..ROWS * COLUMNS))?;
        let name = format!("rank {rank}, step {step}, {}", M::DTYPE);
        results.near(name, &read::<D, M>(device, &gradient)?, tolerance);
    }
    Ok(())
}

/// Of [[1, 2], [2, 4]] and [[3, 6], [6, 12]] at rank 1 the mean comes through whole; zeros give zeros.
fn power_sgd_as_worked_out<D: LowRank>(comm: &Comm, device: &D) -> Result<Results> {
    let times = if comm.rank().is_multiple_of(2) { 1.0 } else { 3.0 };
    let mean = if comm.world_size() == 1 { 1.0 } else { 2.0 };
    for (own, expected) in [(times, mean), (0.0, 0.0)] {
        let mut power = PowerSgd::<D, f64>::new(device, 2, 2, 1, 7)?;
        for _ in 0..3 {
            let mut gradient = device.upload(&[1.0, 2.0, 2.0, 4.0].map(|x| x * own))?;
            power.reduce(comm, &mut device.view_mut(&mut gradient, 0..4))?;
            for (here, of_one) in read::<D, f64>(device, &gradient)?.iter().zip([1.0, 2.0, 2.0, 4.0]) {
                assert!((here - of_one * expected).abs() < 1e-12, "{here} is not {of_one} times {expected}");
            }
        }
    }
    Ok(Results::default())
}
