//! Nor may the closure own a buffer of the group: it would be freed before the group's end.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let message = vec![1u8; 4];
    comm.group(move |g| g.send(&message, 0))
}
