//! Two fully connected layers, 64 → 64 → 10, with ReLU between them and softmax behind, as kernels.
//!
//! All parameters lie in one slice, and so do their gradients and, behind them, the loss.

use crate::Result;
use crate::digits::{CLASSES, Image, PIXELS};
use crate::kernels::compile;
use crate::random::Random;
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use std::ops::Range;
use std::sync::Arc;

const HIDDEN: usize = 64;

const W1: Range<usize> = 0..PIXELS * HIDDEN;
const B1: Range<usize> = W1.end..W1.end + HIDDEN;
const W2: Range<usize> = B1.end..B1.end + HIDDEN * CLASSES;
const B2: Range<usize> = W2.end..W2.end + CLASSES;

/// How many numbers the network consists of.
pub const PARAMETERS: usize = B2.end;

/// What `forward` leaves of an image, in this order: hidden units, their derivatives, the scores' derivatives, the loss,
/// and 1 if the class was found.
const LEFT: usize = 2 * HIDDEN + CLASSES + 2;

const KERNELS: &str = r#"
#define PIXELS 64
#define HIDDEN 64
#define CLASSES 10
#define W1 0
#define B1 (PIXELS * HIDDEN)
#define W2 (B1 + HIDDEN)
#define B2 (W2 + HIDDEN * CLASSES)
#define PARAMETERS (B2 + CLASSES)
#define LEFT (2 * HIDDEN + CLASSES + 2)

// A block for each image, a thread for each hidden unit.
extern "C" __global__ void forward(const float *parameters, const float *pixels, const int *classes, const int *order,
                                   int first, float weight, float *left) {
    int image = order[first + blockIdx.x], unit = threadIdx.x;
    const float *inputs = pixels + image * PIXELS;
    float *hidden = left + blockIdx.x * LEFT, *by_hidden = hidden + HIDDEN, *by_score = by_hidden + HIDDEN;
    float sum = parameters[B1 + unit];
    for (int i = 0; i < PIXELS; i++) sum += parameters[W1 + unit * PIXELS + i] * inputs[i];
    hidden[unit] = fmaxf(sum, 0);
    __syncthreads();
    if (unit < CLASSES) {
        float score = parameters[B2 + unit];
        for (int i = 0; i < HIDDEN; i++) score += parameters[W2 + unit * HIDDEN + i] * hidden[i];
        by_score[unit] = score;
    }
    __syncthreads();
    if (unit == 0) {
        int best = 0, class_ = classes[image];
        for (int c = 1; c < CLASSES; c++) if (by_score[c] > by_score[best]) best = c;
        float largest = by_score[best], own = by_score[class_], total = 0;
        for (int c = 0; c < CLASSES; c++) total += expf(by_score[c] - largest);
        for (int c = 0; c < CLASSES; c++)
            by_score[c] = weight * (expf(by_score[c] - largest) / total - (c == class_));
        by_score[CLASSES] = weight * (logf(total) + largest - own);
        by_score[CLASSES + 1] = best == class_;
    }
    __syncthreads();
    float derivative = 0;
    for (int c = 0; c < CLASSES; c++) derivative += by_score[c] * parameters[W2 + c * HIDDEN + unit];
    by_hidden[unit] = hidden[unit] > 0 ? derivative : 0;
}

// A thread for each parameter, and one for the loss, over all images: always in the same order.
extern "C" __global__ void backward(const float *pixels, const int *order, int first, int images, const float *left,
                                    float *gradient) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p > PARAMETERS) return;
    float sum = 0;
    for (int i = 0; i < images; i++) {
        const float *hidden = left + i * LEFT, *by_hidden = hidden + HIDDEN, *by_score = by_hidden + HIDDEN;
        const float *inputs = pixels + order[first + i] * PIXELS;
        if (p < B1) sum += by_hidden[p / PIXELS] * inputs[p % PIXELS];
        else if (p < W2) sum += by_hidden[p - B1];
        else if (p < B2) sum += by_score[(p - W2) / HIDDEN] * hidden[(p - W2) % HIDDEN];
        else sum += by_score[p - B2];  // a bias, or behind them the loss
    }
    gradient[p] = sum;
}

extern "C" __global__ void step(float *parameters, float *velocity, const float *gradient, float *loss,
                                float learning_rate, float momentum, float images) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p == PARAMETERS) *loss += gradient[p] * images;
    if (p >= PARAMETERS) return;
    velocity[p] = momentum * velocity[p] - learning_rate * gradient[p];
    parameters[p] += velocity[p];
}
"#;

/// Small random weights, after He; no bias.
fn initial_parameters(seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    let mut parameters = vec![0.0; PARAMETERS];
    for (weights, inputs) in [(W1, PIXELS), (W2, HIDDEN)] {
        let limit = (6.0 / inputs as f32).sqrt();
        parameters[weights].fill_with(|| random.uniform() * limit);
    }
    parameters
}

/// Images in GPU memory.
pub struct Images {
    pixels: CudaSlice<f32>,
    classes: CudaSlice<i32>,
    pub len: usize,
}

impl Images {
    pub fn new(stream: &Arc<CudaStream>, images: &[Image]) -> Result<Images> {
        let pixels: Vec<f32> = images.iter().flat_map(|image| image.pixels).collect();
        let classes: Vec<i32> = images.iter().map(|image| image.class as i32).collect();
        let (pixels, classes) = (stream.clone_htod(&pixels)?, stream.clone_htod(&classes)?);
        Ok(Images { pixels, classes, len: images.len() })
    }
}

/// The network, and everything that training needs, in GPU memory.
pub struct Network {
    stream: Arc<CudaStream>,
    forward: CudaFunction,
    backward: CudaFunction,
    step: CudaFunction,
    pub parameters: CudaSlice<f32>,
    velocity: CudaSlice<f32>,
    /// Of this rank's share of a batch; with the loss behind.
    pub gradient: CudaSlice<f32>,
    left: CudaSlice<f32>,
    loss: CudaSlice<f32>,
}

/// Threads for each parameter and the loss.
fn each_parameter() -> LaunchConfig {
    LaunchConfig {
        grid_dim: ((PARAMETERS as u32 + 1).div_ceil(128), 1, 1),
        block_dim: (128, 1, 1),
        shared_mem_bytes: 0,
    }
}

impl Network {
    /// `most`: images that are looked at in one go.
    pub fn new(stream: &Arc<CudaStream>, most: usize) -> Result<Network> {
        let module = compile(stream.context(), KERNELS)?;
        Ok(Network {
            stream: stream.clone(),
            forward: module.load_function("forward")?,
            backward: module.load_function("backward")?,
            step: module.load_function("step")?,
            parameters: stream.clone_htod(&initial_parameters(7))?,
            velocity: stream.alloc_zeros(PARAMETERS)?,
            gradient: stream.alloc_zeros(PARAMETERS + 1)?,
            left: stream.alloc_zeros(most * LEFT)?,
            loss: stream.alloc_zeros(1)?,
        })
    }

    /// Computes the gradient of the images `order[share]`, each weighted, and their loss.
    pub fn compute_gradient(
        &mut self,
        images: &Images,
        order: &CudaSlice<i32>,
        share: Range<usize>,
        weight: f32,
    ) -> Result<()> {
        self.look_at(images, order, share.clone(), weight)?;
        let (first, count) = (share.start as i32, share.len() as i32);
        let mut launch = self.stream.launch_builder(&self.backward);
        launch.arg(&images.pixels).arg(order).arg(&first).arg(&count).arg(&self.left).arg(&mut self.gradient);
        // SAFETY: the kernel's arguments; `share` is inside the order, which names images that are there.
        unsafe { launch.launch(each_parameter()) }?;
        Ok(())
    }

    fn look_at(
        &mut self,
        images: &Images,
        order: &CudaSlice<i32>,
        share: Range<usize>,
        weight: f32,
    ) -> Result<()> {
        assert!(share.end <= order.len() && share.len() * LEFT <= self.left.len());
        if share.is_empty() {
            return Ok(());
        }
        let (first, count) = (share.start as i32, share.len() as u32);
        let config =
            LaunchConfig { grid_dim: (count, 1, 1), block_dim: (HIDDEN as u32, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.stream.launch_builder(&self.forward);
        launch.arg(&self.parameters).arg(&images.pixels).arg(&images.classes).arg(order);
        launch.arg(&first).arg(&weight).arg(&mut self.left);
        // SAFETY: the kernel's arguments; a block for each image of the share, with room for what it leaves.
        unsafe { launch.launch(config) }?;
        Ok(())
    }

    /// Moves the parameters along the gradient, which by now is that of all ranks' `images`, and adds up the loss.
    pub fn step(&mut self, learning_rate: f32, momentum: f32, images: f32) -> Result<()> {
        let mut launch = self.stream.launch_builder(&self.step);
        launch.arg(&mut self.parameters).arg(&mut self.velocity).arg(&self.gradient).arg(&mut self.loss);
        launch.arg(&learning_rate).arg(&momentum).arg(&images);
        // SAFETY: the kernel's arguments.
        unsafe { launch.launch(each_parameter()) }?;
        Ok(())
    }

    /// The loss of the steps since the last time. Waits for them.
    pub fn take_loss(&mut self) -> Result<f32> {
        let loss = self.stream.clone_dtoh(&self.loss)?[0];
        self.stream.memset_zeros(&mut self.loss)?;
        Ok(loss)
    }

    /// The share of the images whose class the network finds.
    pub fn accuracy(&mut self, images: &Images) -> Result<f32> {
        let order: Vec<i32> = (0..images.len as i32).collect();
        let order = self.stream.clone_htod(&order)?;
        self.look_at(images, &order, 0..images.len, 1.0)?;
        let left = self.stream.clone_dtoh(&self.left)?;
        let right: f32 = left.chunks(LEFT).take(images.len).map(|image| image[LEFT - 1]).sum();
        Ok(right / images.len as f32)
    }
}
