//! Sizes in bytes as text: `64`, `4K`, `32M`, `1G`. The suffixes are powers of 1024, as in the reference
//! benchmark.

const SUFFIXES: [(char, u64); 4] = [('K', 1 << 10), ('M', 1 << 20), ('G', 1 << 30), ('T', 1 << 40)];

/// Reads a size. `K`, `KB` and `KiB` all mean 1024, in upper or lower case.
pub fn parse(text: &str) -> Result<usize, String> {
    let expected = || format!("{text:?} is no size: expected bytes like 64, 4K, 32M or 1G");
    let upper = text.trim().to_ascii_uppercase();
    let digits = upper.len() - upper.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = upper.split_at(digits);
    let number: u64 = number.parse().map_err(|_| expected())?;

    let unit = unit.trim_start();
    let letter = unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(unit);
    let factor = match letter {
        "" => 1,
        _ => SUFFIXES
            .into_iter()
            .find_map(|(suffix, factor)| letter.strip_prefix(suffix).map(|rest| (rest, factor)))
            .and_then(|(rest, factor)| rest.is_empty().then_some(factor))
            .ok_or_else(expected)?,
    };
    number
        .checked_mul(factor)
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| format!("{text} is more than this machine can address"))
}

/// Writes a size with the largest suffix that leaves at least 1: `4 KiB`, `1.5 MiB`.
pub fn format(bytes: u64) -> String {
    match SUFFIXES.into_iter().rev().find(|&(_, factor)| bytes >= factor) {
        None => format!("{bytes} B"),
        Some((suffix, factor)) if bytes.is_multiple_of(factor) => {
            format!("{} {suffix}iB", bytes / factor)
        }
        Some((suffix, factor)) => format!("{:.1} {suffix}iB", bytes as f64 / factor as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_powers_of_1024() {
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("64"), Ok(64));
        assert_eq!(parse("64B"), Ok(64));
        assert_eq!(parse("4k"), Ok(4096));
        assert_eq!(parse("4KiB"), Ok(4096));
        assert_eq!(parse("4 kb"), Ok(4096));
        assert_eq!(parse("32M"), Ok(32 << 20));
        assert_eq!(parse("2G"), Ok(2 << 30));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "K", "-4", "4X", "4KM", "1.5", "4iB iB"] {
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
