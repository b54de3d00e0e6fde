//! The images, split into those that are learnt and those that are held out.

use crate::Result;
use crate::random::Random;
use flate2::read::GzDecoder;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

pub const PIXELS: usize = 64;
pub const CLASSES: usize = 10;

pub struct Image {
    /// From 0 to 1.
    pub pixels: [f32; PIXELS],
    pub class: usize,
}

pub struct Digits {
    pub learnt: Vec<Image>,
    pub held_out: Vec<Image>,
}

/// Reads the images; a fifth of them, the same on every rank and in every run, is held out.
pub fn load(path: &Path) -> Result<Digits> {
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut learnt = Vec::new();
    for (number, line) in BufReader::new(GzDecoder::new(file)).lines().enumerate() {
        let image = parse(&line?).ok_or_else(|| format!("{}: line {}", path.display(), number + 1))?;
        learnt.push(image);
    }
    Random(2024).shuffle(&mut learnt);
    let held_out = learnt.split_off(learnt.len() * 4 / 5);
    if held_out.is_empty() {
        return Err(format!("{}: too few images", path.display()).into());
    }
    Ok(Digits { learnt, held_out })
}

fn parse(line: &str) -> Option<Image> {
    let mut numbers = line.split(',').map(|number| number.trim().parse::<u8>().ok());
    let mut pixels = [0.0; PIXELS];
    for pixel in &mut pixels {
        *pixel = f32::from(numbers.next()??) / 16.0;
    }
    let class = usize::from(numbers.next()??);
    (class < CLASSES && numbers.next().is_none()).then_some(Image { pixels, class })
}
