//! Two fully connected layers, 64 → 64 → 10, with ReLU between them and softmax behind.
//!
//! All parameters lie in one flat slice, and so do their gradients: one all_reduce moves them all.

use crate::digits::{CLASSES, Image, PIXELS};
use crate::random::Random;
use std::ops::Range;

const HIDDEN: usize = 64;

const W1: Range<usize> = 0..PIXELS * HIDDEN;
const B1: Range<usize> = W1.end..W1.end + HIDDEN;
const W2: Range<usize> = B1.end..B1.end + HIDDEN * CLASSES;
const B2: Range<usize> = W2.end..W2.end + CLASSES;

/// How many numbers the network consists of.
pub const PARAMETERS: usize = B2.end;

/// Small random weights, after He; no bias.
pub fn initial_parameters(seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    let mut parameters = vec![0.0; PARAMETERS];
    for (weights, inputs) in [(W1, PIXELS), (W2, HIDDEN)] {
        let limit = (6.0 / inputs as f32).sqrt();
        parameters[weights].fill_with(|| random.uniform() * limit);
    }
    parameters
}

/// Row-major weights (a row for each output) times inputs plus bias.
fn layer(weights: &[f32], bias: &[f32], inputs: &[f32], outputs: &mut [f32]) {
    for ((output, row), bias) in outputs.iter_mut().zip(weights.chunks_exact(inputs.len())).zip(bias) {
        *output = bias + row.iter().zip(inputs).map(|(w, x)| w * x).sum::<f32>();
    }
}

fn forward(parameters: &[f32], image: &Image) -> ([f32; HIDDEN], [f32; CLASSES]) {
    let mut hidden = [0.0; HIDDEN];
    layer(&parameters[W1], &parameters[B1], &image.pixels, &mut hidden);
    hidden.iter_mut().for_each(|h| *h = h.max(0.0));
    let mut scores = [0.0; CLASSES];
    layer(&parameters[W2], &parameters[B2], &hidden, &mut scores);
    (hidden, scores)
}

/// Adds `weight` times the gradient of the image's cross-entropy, and answers `weight` times that loss.
pub fn add_gradient(parameters: &[f32], image: &Image, weight: f32, gradient: &mut [f32]) -> f32 {
    let (hidden, scores) = forward(parameters, image);
    let largest = scores.iter().copied().fold(f32::MIN, f32::max);
    let total: f32 = scores.iter().map(|score| (score - largest).exp()).sum();
    let mut by_hidden = [0.0; HIDDEN];
    for (class, score) in scores.iter().enumerate() {
        let probability = (score - largest).exp() / total;
        let by_score = weight * (probability - f32::from(u8::from(class == image.class)));
        let row = W2.start + class * HIDDEN..W2.start + (class + 1) * HIDDEN;
        for (g, h) in gradient[row.clone()].iter_mut().zip(&hidden) {
            *g += by_score * h;
        }
        for (g, w) in by_hidden.iter_mut().zip(&parameters[row]) {
            *g += by_score * w;
        }
        gradient[B2.start + class] += by_score;
    }
    for (unit, by_unit) in by_hidden.into_iter().enumerate().filter(|(unit, _)| hidden[*unit] > 0.0) {
        let row = W1.start + unit * PIXELS..W1.start + (unit + 1) * PIXELS;
        for (g, pixel) in gradient[row].iter_mut().zip(&image.pixels) {
            *g += by_unit * pixel;
        }
        gradient[B1.start + unit] += by_unit;
    }
    weight * (total.ln() + largest - scores[image.class])
}

/// The share of the images whose class the network finds.
pub fn accuracy(parameters: &[f32], images: &[Image]) -> f32 {
    let right = images.iter().filter(|image| {
        let (_, scores) = forward(parameters, image);
        let best = (0..CLASSES).max_by(|a, b| scores[*a].total_cmp(&scores[*b]));
        best == Some(image.class)
    });
    right.count() as f32 / images.len() as f32
}
