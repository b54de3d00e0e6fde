//! Operations as ranges of NVTX and spans of `tracing`, for profilers and subscribers that want them.
//!
//! Both are looked for when a communicator is made: a profiler that has told NVTX of itself, as `nsys profile` does, and a subscriber that
//! takes spans of the target `phalanx::operations`. Without them an operation pays one comparison.

use super::recorder::RECORDS;
use crate::contract::Operation;
use crate::os::log::{self, OperationSpan};
use crate::os::sync::lock;
use phalanx_sys::nvtx::*;
use std::ffi::CString;
use std::sync::{Mutex, OnceLock};

/// The ranges of one communicator's operations that are under way.
pub(super) struct Ranges {
    communicator: String,
    /// The range of the operation with number `n` is in place `n`, modulo their number.
    open: Box<[Mutex<Option<Range>>]>,
    nvtx: Option<&'static Nvtx>,
    has_spans: bool,
}

struct Range {
    number: u64,
    nvtx: Option<(&'static Nvtx, nvtxRangeId_t)>,
    _span: Option<OperationSpan>,
}

/// The loaded library.
struct Nvtx {
    domain: usize,
    start: unsafe extern "C" fn(nvtxDomainHandle_t, *const nvtxEventAttributes_t) -> nvtxRangeId_t,
    end: unsafe extern "C" fn(nvtxDomainHandle_t, nvtxRangeId_t),
    /// By the operations' codes, from 1.
    names: Vec<CString>,
}

impl Ranges {
    /// For a communicator of this name, if anybody wants them.
    pub fn wanted(communicator: &str) -> Option<Ranges> {
        let nvtx = Nvtx::wanted();
        let has_spans = log::takes_operations();
        (has_spans || nvtx.is_some()).then(|| Ranges {
            communicator: communicator.to_owned(),
            open: (0..RECORDS).map(|_| Mutex::default()).collect(),
            nvtx,
            has_spans,
        })
    }

    /// An operation with this record's number begins.
    #[cold]
    pub fn begin(&self, number: u64, operation: Operation, bytes: u64) {
        let span = || OperationSpan::new(operation.name(), bytes, &self.communicator);
        let span = self.has_spans.then(span);
        let nvtx = self.nvtx.map(|nvtx| (nvtx, nvtx.begin(operation, bytes)));
        *lock(self.place(number)) = Some(Range { number, nvtx, _span: span });
    }

    /// It has ended.
    #[cold]
    pub fn end(&self, number: u64) {
        let ended = lock(self.place(number)).take_if(|range| range.number == number);
        drop(ended);
    }

    fn place(&self, number: u64) -> &Mutex<Option<Range>> {
        &self.open[number as usize % RECORDS]
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some((nvtx, id)) = self.nvtx {
            nvtx.end(id);
        }
    }
}

impl Nvtx {
    /// The library, if a profiler waits for its events.
    fn wanted() -> Option<&'static Nvtx> {
        static NVTX: OnceLock<Option<Nvtx>> = OnceLock::new();
        let is_profiled = std::env::var_os(INJECTION).is_some_and(|library| !library.is_empty());
        let load = || (is_profiled && !phalanx_sys::is_secure()).then(Nvtx::load).flatten();
        NVTX.get_or_init(load).as_ref()
    }

    fn load() -> Option<Nvtx> {
        let (library, functions) = Functions::open()
            .inspect_err(|error| log::warn!("the profiler gets no ranges of operations: {error}"))
            .ok()?;
        let (create, start, end) =
            (functions.nvtxDomainCreateA?, functions.nvtxDomainRangeStartEx?, functions.nvtxDomainRangeEnd?);
        log::debug!("operations are ranges of {}", library.path().display());
        // SAFETY: a C string.
        let domain = unsafe { create(c"phalanx".as_ptr()) };
        let name = |code| Operation::from_code(code).map(|operation| CString::new(operation.name()));
        let names = (1..).map_while(name).map(|name| name.expect("names have no NUL")).collect();
        Some(Nvtx { domain: domain.addr(), start, end, names })
    }

    fn domain(&self) -> nvtxDomainHandle_t {
        std::ptr::without_provenance_mut(self.domain)
    }

    fn begin(&self, operation: Operation, bytes: u64) -> nvtxRangeId_t {
        let attributes = nvtxEventAttributes_t {
            version: NVTX_VERSION,
            size: size_of::<nvtxEventAttributes_t>() as u16,
            category: 0,
            colorType: 0,
            color: 0,
            payloadType: NVTX_PAYLOAD_TYPE_UNSIGNED_INT64,
            reserved0: 0,
            payload: bytes,
            messageType: NVTX_MESSAGE_TYPE_ASCII,
            message: self.names[operation as usize - 1].as_ptr(),
        };
        // SAFETY: the domain is never destroyed; the attributes live during the call, the message always.
        unsafe { (self.start)(self.domain(), &raw const attributes) }
    }

    fn end(&self, range: nvtxRangeId_t) {
        // SAFETY: a range of this domain, ended once.
        unsafe { (self.end)(self.domain(), range) }
    }
}

#[cfg(test)]
mod tests {
    use crate::contract::{BackendKind, Blocks, Call, Operation};
    use crate::types::dtype::DType;
    use crate::watch::Recorder;
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    /// Keeps what it hears of spans; its spans have numbers from 1.
    #[derive(Clone, Default)]
    struct Heard(Arc<Mutex<Vec<String>>>);

    struct Fields(String);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0 += &format!(" {field}={value:?}");
        }
    }

    impl Subscriber for Heard {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "phalanx::operations"
        }
        fn new_span(&self, attributes: &Attributes<'_>) -> Id {
            let mut fields = Fields(attributes.metadata().name().to_owned());
            attributes.record(&mut fields);
            let mut heard = self.0.lock().unwrap();
            heard.push(fields.0);
            Id::from_u64(heard.len() as u64)
        }
        fn try_close(&self, id: Id) -> bool {
            self.0.lock().unwrap().push(format!("closed {}", id.into_u64()));
            true
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_subscriber_gets_a_span_of_each_operation() {
        let heard = Heard::default();
        tracing::subscriber::with_default(heard.clone(), || {
            let recorder = Recorder::new(BackendKind::Host, "pipeline".into(), 0, 2);
            let call =
                Call { dtype: DType::F64, blocks: Blocks::Equal(3), ..Call::empty(Operation::AllReduce) };
            let (first, second) = (recorder.begin(&call), recorder.open(&Call::empty(Operation::Barrier)));
            recorder.end(first, Ok(())).unwrap();
            recorder.end(second, Ok(())).unwrap();
            assert!(recorder.repeat(second));
            recorder.repeated(second);
        });
        let barrier = "operation operation=\"barrier\" bytes=0 communicator=\"pipeline\"";
        let expected = [
            "operation operation=\"all_reduce\" bytes=24 communicator=\"pipeline\"",
            barrier,
            "closed 1",
            "closed 2",
            barrier,
            "closed 5",
        ];
        assert_eq!(*heard.0.lock().unwrap(), expected);
    }

    #[test]
    fn nobody_pays_for_spans_that_nobody_wants() {
        assert!(super::Ranges::wanted("world").is_none());
    }
}
