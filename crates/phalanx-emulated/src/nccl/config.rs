//! Configurations (`ncclConfig_t`), which grow from version to version.

use super::result::{INVALID_ARGUMENT, fail};
use crate::base::call::Code;
use crate::base::pointers::In;
use crate::base::settings::settings;
use crate::base::violation::violation;
use std::ffi::{CStr, c_char, c_int};

/// The magic number of structures that the caller initialises.
pub const MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`.
pub const UNDEFINED: c_int = c_int::MIN;

/// Each version that changed the structure, and the size from there on.
const SIZES: [(c_int, usize); 9] = [
    (21403, 24),
    (21701, 40),
    (21801, 48),
    (22703, 72),
    (22803, 80),
    (22902, 88),
    (23003, 96),
    (23100, 112),
    (23200, 120),
];

const LONGEST: usize = 120;

/// The settings of a communicator that have an effect here.
#[derive(Debug, Clone)]
pub struct Config {
    pub blocking: bool,
    /// Contexts for puts and signals.
    pub contexts: c_int,
    /// Signals of each context.
    pub signals: c_int,
    name: Option<Name>,
}

/// A communicator's name. As in NCCL, the caller's string is kept and not copied.
#[derive(Debug, Clone)]
struct Name {
    address: usize,
    text: Vec<u8>,
}

impl Default for Config {
    fn default() -> Config {
        Config { blocking: settings().blocking.unwrap_or(true), contexts: 1, signals: 1, name: None }
    }
}

fn size_of_version(version: c_int) -> usize {
    SIZES.iter().rev().find(|(since, _)| *since <= version).map_or(0, |(_, size)| *size)
}

impl Config {
    /// Reads a caller's configuration. Undefined fields are as in `base`.
    pub fn read(function: &str, from: In<u8>, base: &Config) -> Result<Config, Code> {
        if from.is_null() {
            return Ok(base.clone());
        }
        let header = from.slice(16);
        let size = usize::from_ne_bytes(header[..8].try_into().expect("8 bytes"));
        let magic = u32::from_ne_bytes(header[8..12].try_into().expect("4 bytes"));
        if magic != MAGIC {
            return Err(fail(
                INVALID_ARGUMENT,
                "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER",
            ));
        }
        let version = c_int::from_ne_bytes(header[12..16].try_into().expect("4 bytes"));
        let loaded = settings().nccl_version;
        if version > loaded {
            violation(
                function,
                format!("the configuration is of version {version}, the library is {loaded}"),
            );
        }
        if size != size_of_version(version) {
            let right = size_of_version(version);
            violation(
                function,
                format!("a configuration of version {version} has {right} bytes and not {size}"),
            );
        }
        let mut bytes = [0; LONGEST];
        bytes[..size].copy_from_slice(from.slice(size));
        Fields { bytes, size }.interpret(base)
    }

    /// Ends the process if the caller changed or freed the name.
    pub fn check_name(&self, function: &str) {
        let Some(name) = &self.name else { return };
        // SAFETY: `ncclConfig_t` demands that the name outlives the communicator; a freed name may crash
        // here.
        let text = unsafe { CStr::from_ptr(name.address as *const c_char) };
        if text.to_bytes() != name.text {
            violation(function, "the communicator's name (commName) was changed or freed");
        }
    }
}

struct Fields {
    bytes: [u8; LONGEST],
    size: usize,
}

impl Fields {
    fn int(&self, offset: usize) -> Option<c_int> {
        let bytes = self.bytes[offset..offset + 4].try_into().expect("4 bytes");
        (offset + 4 <= self.size).then(|| c_int::from_ne_bytes(bytes)).filter(|value| *value != UNDEFINED)
    }

    fn pointer(&self, offset: usize) -> Option<usize> {
        let bytes = self.bytes[offset..offset + 8].try_into().expect("8 bytes");
        (offset + 8 <= self.size).then(|| usize::from_ne_bytes(bytes)).filter(|address| *address != 0)
    }

    fn interpret(&self, base: &Config) -> Result<Config, Code> {
        let flag = 0..=1;
        let count = 1..=c_int::MAX;
        let ranges = [
            ("blocking", 16, flag.clone()),
            ("cgaClusterSize", 20, 0..=8),
            ("minCTAs", 24, count.clone()),
            ("maxCTAs", 28, count.clone()),
            ("splitShare", 40, flag.clone()),
            ("trafficClass", 44, 0..=c_int::MAX),
            ("collnetEnable", 56, flag.clone()),
            ("CTAPolicy", 60, 0..=3),
            ("shrinkShare", 64, flag.clone()),
            ("nvlsCTAs", 68, count.clone()),
            ("nChannelsPerNetPeer", 72, count.clone()),
            ("nvlinkCentricSched", 76, flag.clone()),
            ("graphUsageMode", 80, 0..=2),
            ("numRmaCtx", 84, count.clone()),
            ("maxP2pPeers", 88, count.clone()),
            ("graphStreamOrdering", 92, flag.clone()),
            ("launchOrderImplicit", 96, flag.clone()),
            ("numRmaSig", 100, count),
            ("rmaEagerInit", 104, flag),
            ("hostCftMode", 108, 1..=3),
            ("nvlsHostMode", 112, 0..=c_int::MAX),
        ];
        for (name, offset, range) in ranges {
            if let Some(value) = self.int(offset).filter(|value| !range.contains(value)) {
                return Err(fail(INVALID_ARGUMENT, format!("Invalid config {name} attribute value {value}")));
            }
        }
        if self.int(24).zip(self.int(28)).is_some_and(|(least, most)| least > most) {
            return Err(fail(INVALID_ARGUMENT, "Invalid config min/max channels attribute value"));
        }
        let blocking = self.int(16).map_or(base.blocking, |value| value == 1);
        let name = self.pointer(48).map(|address| {
            // SAFETY: `ncclConfig_t` demands null or a string, and it is not null.
            let text = unsafe { CStr::from_ptr(address as *const c_char) }.to_bytes().to_vec();
            Name { address, text }
        });
        Ok(Config {
            blocking: settings().blocking.unwrap_or(blocking),
            contexts: self.int(84).unwrap_or(base.contexts),
            signals: self.int(100).unwrap_or(base.signals),
            name: name.or_else(|| base.name.clone()),
        })
    }
}
