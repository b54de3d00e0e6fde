//! The program `phalanx`: see the library of this crate.

fn main() -> std::process::ExitCode {
    phalanx_cli::main()
}
