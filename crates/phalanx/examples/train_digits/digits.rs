//! The images, split into those that are learnt and those that are held out.

use crate::Result;
use crate::random::Random;
use flate2::read::GzDecoder;
use std::borrow::Cow;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// The images of this repository. They are part of the program, which finds them wherever it is run.
const IMAGES: &[u8] = include_bytes!("../data/digits.csv.gz");

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

/// Reads the images of a file, or those of the repository; a fifth of them, the same on every rank and in every run, is
/// held out.
pub fn load(path: Option<&Path>) -> Result<Digits> {
    let name = path.map_or("the images".into(), Path::to_string_lossy);
    let file = match path {
        None => Cow::Borrowed(IMAGES),
        Some(path) => Cow::Owned(std::fs::read(path).map_err(|error| format!("{name}: {error}"))?),
    };
    let mut learnt = Vec::new();
    for (number, line) in BufReader::new(GzDecoder::new(&*file)).lines().enumerate() {
        let line = line.map_err(|error| format!("{name}: {error}"))?;
        learnt.push(parse(&line).ok_or_else(|| format!("{name}: line {}", number + 1))?);
    }
    Random(2024).shuffle(&mut learnt);
    let held_out = learnt.split_off(learnt.len() * 4 / 5);
    if held_out.is_empty() {
        return Err(format!("{name}: too few images").into());
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
