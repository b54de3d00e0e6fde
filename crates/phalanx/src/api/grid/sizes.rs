//! The sizes of a grid's dimensions, chosen as equal as possible.

use super::refused;
use crate::types::error::Result;

/// The sizes with each 0 replaced: the product is the number of ranks, and the chosen sizes are in decreasing order. Of all such sizes, those
/// whose largest is smallest, then whose second is smallest, and so on.
pub fn balanced(ranks: usize, sizes: &[usize]) -> Result<Vec<usize>> {
    let given =
        sizes.iter().filter(|size| **size != 0).try_fold(1usize, |product, size| product.checked_mul(*size));
    let free = sizes.iter().filter(|size| **size == 0).count();
    let chosen = given
        .filter(|given| ranks != 0 && ranks.is_multiple_of(*given))
        .and_then(|given| factors(ranks / given, free, usize::MAX));
    let Some(mut chosen) = chosen else {
        return Err(refused(
            "sizes",
            sizes,
            format!("sizes that {ranks} ranks can have; 0 for those to choose"),
        ));
    };
    chosen.reverse();
    Ok(sizes
        .iter()
        .map(|size| if *size == 0 { chosen.pop().expect("one for each 0") } else { *size })
        .collect())
}

/// So many factors of a number in decreasing order, none larger than `limit`.
fn factors(number: usize, count: usize, limit: usize) -> Option<Vec<usize>> {
    if count == 0 {
        return (number == 1).then(Vec::new);
    }
    let divisors = (1..=number.min(limit)).filter(|divisor| number.is_multiple_of(*divisor));
    divisors.into_iter().find_map(|largest| {
        let mut rest = factors(number / largest, count - 1, largest)?;
        rest.insert(0, largest);
        Some(rest)
    })
}

#[cfg(test)]
mod tests {
    use super::balanced;

    #[test]
    fn sizes_are_as_equal_as_possible() {
        let cases: [(usize, &[usize], &[usize]); 12] = [
            (6, &[0, 0], &[3, 2]),
            (7, &[0, 0], &[7, 1]),
            (6, &[0, 3, 0], &[2, 3, 1]),
            (16, &[0, 0, 0], &[4, 2, 2]),
            (12, &[0, 0, 0], &[3, 2, 2]),
            (60, &[0, 0, 0], &[5, 4, 3]),
            (36, &[0, 0, 0], &[4, 3, 3]),
            (512, &[0, 0, 0], &[8, 8, 8]),
            (1, &[0, 0], &[1, 1]),
            (8, &[2, 4], &[2, 4]),
            (24, &[0, 2, 0], &[4, 2, 3]),
            (5, &[0], &[5]),
        ];
        for (ranks, sizes, expected) in cases {
            assert_eq!(balanced(ranks, sizes).unwrap(), expected, "{ranks} ranks, {sizes:?}");
        }
    }

    #[test]
    fn ranks_that_do_not_fit_are_refused() {
        for (ranks, sizes) in [(7, &[0, 3][..]), (8, &[2, 2]), (0, &[0]), (4, &[])] {
            let error = balanced(ranks, sizes).unwrap_err().to_string();
            assert!(error.contains(&format!("{ranks} ranks can have")), "{error}");
        }
    }
}
