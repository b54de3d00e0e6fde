//! Sizes in bytes as text: `64`, `4K`, `32MiB`, `1GB`. Units are those of dd(1), and of the reference benchmark,
//! which has only the first row:
//!
//! | unit | bytes |
//! |---|---|
//! | K, M, G, T | powers of 1024 |
//! | KiB, MiB, GiB, TiB | powers of 1024 |
//! | KB, MB, GB, TB | powers of 1000 |

const PREFIXES: [(char, u32); 4] = [('K', 1), ('M', 2), ('G', 3), ('T', 4)];

/// Reads a size. Upper and lower case are the same.
pub fn parse(text: &str) -> Result<usize, String> {
    let expected =
        || format!("{text:?} is no size: expected bytes like 64, 4K or 4KiB (1024 each), 4KB (1000 each)");
    let upper = text.trim().to_ascii_uppercase();
    let digits = upper.len() - upper.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = upper.split_at(digits);
    let number: u64 = number.parse().map_err(|_| expected())?;
    let factor = factor(unit.trim_start()).ok_or_else(expected)?;
    number
        .checked_mul(factor)
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| format!("{text} is more than this machine can address"))
}

fn factor(unit: &str) -> Option<u64> {
    if matches!(unit, "" | "B") {
        return Some(1);
    }
    let (_, power) = PREFIXES.into_iter().find(|(prefix, _)| unit.starts_with(*prefix))?;
    match &unit[1..] {
        "" | "IB" => Some(1 << (10 * power)),
        "B" => Some(u64::pow(1000, power)),
        _ => None,
    }
}

/// Writes a size with the largest unit that leaves at least 1: `4 KiB`, `1.5 MiB`.
pub fn format(bytes: u64) -> String {
    let mut units = PREFIXES.into_iter().rev().map(|(prefix, power)| (prefix, 1 << (10 * power)));
    match units.find(|&(_, factor)| bytes >= factor) {
        None => format!("{bytes} B"),
        Some((prefix, factor)) if bytes.is_multiple_of(factor) => {
            format!("{} {prefix}iB", bytes / factor)
        }
        Some((prefix, factor)) => format!("{:.1} {prefix}iB", bytes as f64 / factor as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_those_of_dd() {
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("64"), Ok(64));
        assert_eq!(parse("64B"), Ok(64));
        assert_eq!(parse("4k"), Ok(4096));
        assert_eq!(parse("4KiB"), Ok(4096));
        assert_eq!(parse("4 kb"), Ok(4000));
        assert_eq!((parse("1M"), parse("1MiB"), parse("1MB")), (Ok(1 << 20), Ok(1 << 20), Ok(1_000_000)));
        assert_eq!(parse("32M"), Ok(32 << 20));
        assert_eq!(parse("2G"), Ok(2 << 30));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "K", "-4", "4X", "4KM", "1.5", "4iB iB", "4iB", "4Ki", "4é"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        assert!(parse("99999999999999999999").is_err());
        assert!(parse("99999999999T").unwrap_err().contains("address"));
    }

    #[test]
    fn sizes_are_written_short() {
        assert_eq!(format(0), "0 B");
        assert_eq!(format(1023), "1023 B");
        assert_eq!(format(4096), "4 KiB");
        assert_eq!(format(1536), "1.5 KiB");
        assert_eq!(format(64 << 20), "64 MiB");
    }

    #[test]
    fn what_is_written_in_whole_units_can_be_read() {
        for bytes in [1, 4096, 64 << 20, 3 << 30] {
            assert_eq!(parse(&format(bytes)), Ok(bytes as usize));
        }
    }
}
