//! Ranks and times as text.

/// `rank 3`, `ranks 1, 2 and 5`.
pub fn ranks(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().take(12).map(ToString::to_string).collect();
    match numbers.as_slice() {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        _ if ranks.len() > numbers.len() => {
            format!("ranks {}, … ({} in all)", numbers.join(", "), ranks.len())
        }
        [others @ .., last] => format!("ranks {} and {last}", others.join(", ")),
    }
}

/// A time in nanoseconds, in the unit that suits it.
pub fn time(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{:.1} µs", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanos as f64 / 1e6),
        _ => format!("{:.1} s", nanos as f64 / 1e9),
    }
}
