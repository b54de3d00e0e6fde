//! Prints the public interface in a crate's rustdoc JSON, one item a line: see `.ci/public-api`.

use public_api::Builder;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let json = std::env::args_os().nth(1).ok_or("usage: public-api FILE.json")?;
    let api = Builder::from_rustdoc_json(json)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .omit_blanket_impls(true)
        .build()?;
    println!("{api}");
    Ok(())
}
