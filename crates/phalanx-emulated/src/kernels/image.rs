//! Images of modules: PTX, which is text, and cubins, which are ELF files.

use crate::base::call::Code;
use crate::base::pointers::In;
use crate::base::settings::settings;
use crate::cuda::error::{INVALID_IMAGE, NO_BINARY_FOR_GPU};
use std::ffi::{CStr, c_char};

/// A module's image, copied.
#[derive(Debug)]
pub enum Image {
    Ptx(String),
    Cubin(Vec<u8>),
}

/// The first bytes of an ELF file.
const ELF: [u8; 4] = *b"\x7fELF";
/// Bytes of its header.
const HEADER: usize = 64;
/// The type of a section without bytes in the file (`SHT_NOBITS`).
const NO_BITS: u64 = 8;

impl Image {
    /// Copies an image. An error if it is for other GPUs than the emulated ones.
    pub fn load(image: In<c_char>) -> Result<Image, Code> {
        let start = image.address() as *const u8;
        if start.is_null() {
            return Err(INVALID_IMAGE);
        }
        // SAFETY: a PTX text or a cubin by the caller's guarantee, and both are longer than this.
        let first = unsafe { std::slice::from_raw_parts(start, ELF.len()) };
        if first == ELF {
            return Image::cubin(start);
        }
        // SAFETY: a text that ends in NUL by the caller's guarantee.
        let text = unsafe { CStr::from_ptr(start.cast()) }.to_str().map_err(|_| INVALID_IMAGE)?;
        let target = text.split_once(".target sm_").ok_or(INVALID_IMAGE)?.1;
        let digits: String = target.chars().take_while(char::is_ascii_digit).collect();
        let (major, minor) = settings().compute_capability;
        match digits.parse::<i32>() {
            Ok(least) if least <= 10 * major + minor => Ok(Image::Ptx(text.to_owned())),
            Ok(_) => Err(NO_BINARY_FOR_GPU),
            Err(_) => Err(INVALID_IMAGE),
        }
    }

    fn cubin(start: *const u8) -> Result<Image, Code> {
        // SAFETY: an ELF file by the caller's guarantee begins with a header of 64 bytes.
        let header = unsafe { std::slice::from_raw_parts(start, HEADER) };
        let (sections, size, count) = (word(header, 40, 8), word(header, 58, 2), word(header, 60, 2));
        let table = (sections + size * count) as usize;
        // SAFETY: the file has the table of its sections, by its header.
        let upto_table = unsafe { std::slice::from_raw_parts(start, table) };
        let end = (0..count).map(|n| (sections + n * size) as usize).map(|section| {
            let is_there = word(upto_table, section + 4, 4) != NO_BITS;
            if is_there { word(upto_table, section + 24, 8) + word(upto_table, section + 32, 8) } else { 0 }
        });
        let programs = word(header, 32, 8) + word(header, 54, 2) * word(header, 56, 2);
        let len = end.max().unwrap_or(0).max(programs).max(table as u64) as usize;
        // SAFETY: the file has all that its tables name.
        let all = unsafe { std::slice::from_raw_parts(start, len) };
        // The compute capability is in the flags, ten times its major number plus its minor one.
        let made_for = (word(header, 48, 4) & 0xff) as i32;
        let (major, minor) = settings().compute_capability;
        match (made_for / 10, made_for % 10) {
            (its, least) if its == major && least <= minor => Ok(Image::Cubin(all.to_vec())),
            _ => Err(NO_BINARY_FOR_GPU),
        }
    }

    /// Whether it has a kernel with this name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Image::Ptx(text) => text.contains(&format!(".entry {name}(")),
            Image::Cubin(bytes) => {
                // The section of its code.
                let section = format!(".text.{name}\0");
                bytes.windows(section.len()).any(|part| part == section.as_bytes())
            }
        }
    }
}

/// A little-endian number in a file.
fn word(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}
