//! A group is one thread's.

fn main() -> phalanx::Result<()> {
    phalanx::group(|g| {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(g));
        });
        Ok(())
    })
}
