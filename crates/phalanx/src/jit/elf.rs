//! Completeness check of device code. The driver gets its address without a length, and reads wherever the
//! file points to.

/// Sections that have no bytes in the file, and those whose kind only CUDA knows.
const NOBITS: u64 = 8;
const SPECIFIC: u64 = 0x6000_0000;

/// Bytes of a section's entry in the table.
const ENTRY: u64 = 64;

/// Whether the bytes are an ELF file of 64 bits, with all its tables, segments and sections.
pub(crate) fn is_whole(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF\x02\x01") && File(bytes).is_whole().unwrap_or(false)
}

struct File<'a>(&'a [u8]);

impl File<'_> {
    fn is_whole(&self) -> Option<bool> {
        let (programs, sections) = (self.word(32, 8)?, self.word(40, 8)?);
        let (program_size, program_count) = (self.word(54, 2)?, self.word(56, 2)?);
        let (section_size, section_count) = (self.word(58, 2)?, self.word(60, 2)?);
        let has_tables = self.has(programs, program_size * program_count)
            && self.has(sections, section_size * section_count)
            && section_count > 0
            && section_size >= ENTRY;
        if !has_tables {
            return Some(false);
        }
        for number in 0..program_count {
            let entry = programs + number * program_size;
            if !self.has(self.word(entry + 8, 8)?, self.word(entry + 32, 8)?) {
                return Some(false);
            }
        }
        for number in 0..section_count {
            let entry = sections + number * section_size;
            let (kind, start, len) =
                (self.word(entry + 4, 4)?, self.word(entry + 24, 8)?, self.word(entry + 32, 8)?);
            if kind != NOBITS && kind < SPECIFIC && !self.has(start, len) {
                return Some(false);
            }
        }
        Some(true)
    }

    fn has(&self, start: u64, len: u64) -> bool {
        start.checked_add(len).is_some_and(|end| end <= self.0.len() as u64)
    }

    /// A little-endian word of the given number of bytes.
    fn word(&self, at: u64, bytes: usize) -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let bytes = self.0.get(at..at.checked_add(bytes)?)?;
        Some(bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header, 16 bytes of a section, and the table of sections: that one, and one without bytes.
    fn file() -> Vec<u8> {
        let mut file = vec![0; 80 + 2 * ENTRY as usize];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[40] = 80;
        (file[58], file[60]) = (ENTRY as u8, 2);
        (file[80 + 4], file[80 + 24], file[80 + 32]) = (1, 64, 16);
        (file[144 + 4], file[144 + 36]) = (NOBITS as u8, 1);
        file
    }

    #[test]
    fn a_file_is_whole_or_it_is_not() {
        let whole = file();
        assert!(is_whole(&whole));
        for len in 0..whole.len() {
            assert!(!is_whole(&whole[..len]), "{len} bytes of {}", whole.len());
        }
        let with = |at: usize, byte| {
            let mut file = file();
            file[at] = byte;
            is_whole(&file)
        };
        assert!(!with(0, b'E') && !with(4, 1), "no ELF of 64 bits");
        assert!(!with(80 + 32, 255) && !with(80 + 31, 255), "a section that ends behind the file");
        assert!(!with(47, 255) && !with(60, 3), "a table that ends behind the file");
        assert!(!with(58, 8) && !with(60, 0), "no table");
        assert!(with(80 + 7, 0x70), "a section that only CUDA knows");
    }
}
