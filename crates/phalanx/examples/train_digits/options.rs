//! The command line.

use crate::Result;
use std::path::PathBuf;

pub const HELP: &str = "\
Trains a small network on images of digits, data-parallel.

  --ranks N    ranks as threads of this process (default: 2, or what the launcher says)
  --epochs N   passes over the data (default: 20)
  --rebuild    when a rank is lost, wait for the process that replaces it (phalanx launch --restarts)
  --data PATH  the images (default: those of the repository, which the program has with it)";

pub struct Options {
    pub ranks: Option<usize>,
    pub epochs: usize,
    pub rebuild: bool,
    pub data: Option<PathBuf>,
    pub help: bool,
}

impl Options {
    pub fn from_args(mut args: impl Iterator<Item = String>) -> Result<Options> {
        let mut options = Options { ranks: None, epochs: 20, rebuild: false, data: None, help: false };
        while let Some(name) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{name} needs a value"));
            match name.as_str() {
                "--ranks" => options.ranks = Some(value()?.parse().map_err(|e| format!("--ranks: {e}"))?),
                "--epochs" => options.epochs = value()?.parse().map_err(|e| format!("--epochs: {e}"))?,
                "--rebuild" => options.rebuild = true,
                "--data" => options.data = Some(value()?.into()),
                "--help" | "-h" => options.help = true,
                _ => return Err(format!("unknown argument {name}\n\n{HELP}").into()),
            }
        }
        Ok(options)
    }
}
