//! Flight records: any bytes are a record or an error, and what is read can be merged and told of. Files are
//! separated by a byte that none of them contains.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code, reason = "the program uses more of it")]
#[path = "../../crates/phalanx-cli/src/trace"]
mod trace {
    pub mod diagnosis;
    pub mod merge;
    pub mod record;
    pub mod summary;
    pub mod text;
}

fuzz_target!(|bytes: &[u8]| {
    let records: Vec<_> =
        bytes.split(|byte| *byte == 0).filter_map(|file| trace::record::decode(file).ok()).collect();
    if !records.is_empty() {
        let text = trace::summary::write(&trace::merge::merge(records), 12);
        assert!(text.contains("communicator"));
    }
});
