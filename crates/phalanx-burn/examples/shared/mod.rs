//! What the examples share: hand-written digits, a small model, ranks as threads or under a launcher.

// Each example uses a part of it.
#![allow(dead_code)]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::{Args, ValueEnum};
use phalanx::{BackendKind, Comm};
use phalanx_burn::Result;
use std::io::Read;
use std::process::ExitCode;

/// Where the ranks are.
#[derive(Args, Clone, Copy)]
pub struct Place {
    /// Ranks as threads of this process. Without it, the launcher's ranks; or one.
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Where they compute. Without it: on GPUs, if each rank has one.
    #[arg(long)]
    pub device: Option<Kind>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Kind {
    Cpu,
    Cuda,
}

impl Place {
    /// Runs `f` on each rank: on threads, or as the rank that a launcher made of this process.
    pub fn run(self, f: impl Fn(Comm) -> Result<()> + Sync) -> ExitCode {
        let builder = match self.device {
            None => Comm::builder(),
            Some(Kind::Cpu) => Comm::builder().backend(BackendKind::Host),
            Some(Kind::Cuda) => Comm::builder().backend(BackendKind::Nccl),
        };
        let run = || match self.ranks {
            None => f(builder.init()?),
            Some(threads) => builder.try_run(threads, f).map(drop),
        };
        end(run())
    }
}

/// Where a rank's tensors are, as `Ranks::device` says it.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "on the CPU"))]
pub fn device(comm: &Comm) -> Device {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = comm.gpu() {
        return Device::cuda(gpu);
    }
    Device::flex()
}

fn end(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A digit: its pixels, from 0 to 1, and its class.
#[derive(Clone, Debug)]
pub struct Digit {
    pub pixels: [f32; 64],
    pub class: i64,
}

/// 1,797 digits. The last fifth is for the test.
pub fn digits() -> (Vec<Digit>, Vec<Digit>) {
    let mut text = String::new();
    let compressed = include_bytes!("../../../phalanx/examples/data/digits.csv.gz");
    flate2::read::GzDecoder::new(&compressed[..]).read_to_string(&mut text).expect("it is in the program");
    let digit = |line: &str| {
        let numbers: Vec<f32> = line.split(',').map(|number| number.parse().expect("a number")).collect();
        Digit { pixels: std::array::from_fn(|place| numbers[place] / 16.0), class: numbers[64] as i64 }
    };
    let mut all: Vec<Digit> = text.lines().map(digit).collect();
    let test = all.split_off(all.len() * 4 / 5);
    (all, test)
}

/// Pixels `[samples, 64]` and classes `[samples]`.
pub fn tensors(digits: &[Digit], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let pixels: Vec<f32> = digits.iter().flat_map(|digit| digit.pixels).collect();
    let classes: Vec<i64> = digits.iter().map(|digit| digit.class).collect();
    let pixels = Tensor::from_data(TensorData::new(pixels, [digits.len(), 64]), device);
    (pixels, Tensor::from_data(TensorData::new(classes, [digits.len()]), device))
}

/// Two layers.
#[derive(Module, Debug)]
pub struct Net {
    up: Linear,
    down: Linear,
}

impl Net {
    pub fn new(device: &Device) -> Net {
        Net { up: LinearConfig::new(64, 96).init(device), down: LinearConfig::new(96, 10).init(device) }
    }

    /// Logits `[samples, 10]`.
    pub fn forward(&self, pixels: Tensor<2>) -> Tensor<2> {
        self.down.forward(relu(self.up.forward(pixels)))
    }

    /// The part of these digits, in percent, that is recognised.
    pub fn accuracy(&self, digits: &[Digit], device: &Device) -> f64 {
        let (pixels, classes) = tensors(digits, device);
        let found = self.forward(pixels).argmax(1).squeeze_dim::<1>(1);
        let right = found.equal(classes).int().sum().into_scalar::<i64>();
        100.0 * right as f64 / digits.len() as f64
    }
}
