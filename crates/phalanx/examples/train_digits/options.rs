//! The command line.

use crate::Result;
use std::path::PathBuf;

pub const HELP: &str = "\
Trains a small network on images of digits, data-parallel.

  --ranks N    ranks as threads of this process (default: 2, or what the launcher says)
  --epochs N   passes over the data (default: 20)
  --rebuild    when a rank is lost, wait for the process that replaces it (phalanx launch --restarts)
  --data PATH  the images (default: data/digits.csv.gz of the repository)";

pub struct Options {
    pub ranks: Option<usize>,
    pub epochs: usize,
    pub rebuild: bool,
    pub data: PathBuf,
    pub help: bool,
}

impl Options {
    pub fn from_args(mut args: impl Iterator<Item = String>) -> Result<Options> {
        let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../data/digits.csv.gz");
        let mut options = Options { ranks: None, epochs: 20, rebuild: false, data, help: false };
        while let Some(name) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{name} needs a value"));
            match name.as_str() {
                "--ranks" => options.ranks = Some(value()?.parse().map_err(|e| format!("--ranks: {e}"))?),
                "--epochs" => options.epochs = value()?.parse().map_err(|e| format!("--epochs: {e}"))?,
                "--rebuild" => options.rebuild = true,
                "--data" => options.data = value()?.into(),
                "--help" | "-h" => options.help = true,
                _ => return Err(format!("unknown argument {name}\n\n{HELP}").into()),
            }
        }
        Ok(options)
    }
}
