//! UCX in this process: a context, its worker, and an endpoint for each peer that was sent something.
//!
//! One thread at a time uses it ([`UcxWorld`](super::world::UcxWorld) has the lock). UCX calls back into it only from inside its own
//! calls: while one runs, no reference to the [`Mail`] and the [`Parts`] lives.

mod aside;
mod serve;

use super::context::{check, create_context, library};
use super::inbox::Inbox;
use super::mail::{Delivery, Header, Mail, Matching, Posted};
use super::parts::Parts;
use super::tunables::FETCHED;
use crate::control::segment::SegmentId;
use crate::os::RunInstant;
use crate::types::error::Result;
use aside::Aside;
use phalanx_sys::ucx::*;
use serve::{Fetching, Replying};
use std::cell::UnsafeCell;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicI8, AtomicU64, Ordering};
use std::time::Duration;

/// The numbers of our messages, and of accesses to windows, among UCX's active messages.
const MESSAGE: c_uint = 0;
const ACCESS: c_uint = 1;

/// How long the end waits for connections to close, so that what was sent last arrives.
const CLOSING: Duration = Duration::from_secs(1);

/// Rounds of UCX in one call: peers that send without an end are answered in between.
const ROUNDS_OF_PROGRESS: usize = 64;

/// A send or a receive that is under way.
struct Operation {
    /// Where UCX finds a message's header until it is sent.
    header: Box<Header>,
    state: State,
    /// The channel and the rank in it that a receive is from.
    from: (SegmentId, usize),
    /// World rank of the peer.
    peer: usize,
    target: *mut u8,
    len: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// A receive without a message.
    Waiting,
    /// UCX uses the buffer.
    Moving(*mut c_void),
    /// The data comes to memory aside, by its number.
    Aside(usize),
    Over(Outcome),
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Complete,
    /// The message had another length.
    WrongLength,
    /// The connection to the peer broke, or UCX refused.
    Broken,
}

/// What UCX tells of a peer's endpoint, from inside of its calls.
#[derive(Default)]
struct Health {
    is_down: AtomicBool,
    failures: AtomicU64,
    status: AtomicI8,
}

impl Health {
    fn fail(&self, status: ucs_status_t) {
        self.status.store(status.0, Ordering::Relaxed);
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.is_down.store(true, Ordering::Relaxed);
    }
}

struct Peer {
    address: Vec<u8>,
    endpoint: Option<ucp_ep_h>,
    health: Box<Health>,
}

pub(super) struct Worker {
    ucx: &'static Ucx,
    context: ucp_context_h,
    worker: ucp_worker_h,
    mail: Box<UnsafeCell<Mail>>,
    /// What other ranks access here.
    parts: Box<UnsafeCell<Parts>>,
    fetching: Vec<Fetching>,
    replying: Vec<Replying>,
    /// By world rank.
    peers: Vec<Peer>,
    operations: Vec<Operation>,
    free: Vec<usize>,
    asides: Vec<Option<Aside>>,
    /// Requests of endpoints that are being closed.
    closing: Vec<*mut c_void>,
    rank: usize,
    warned: bool,
}

// SAFETY: a worker in serialized mode may be used by any thread, one at a time; so may all else behind the pointers.
unsafe impl Send for Worker {}

impl Worker {
    /// A worker without peers, as world rank `rank` of so many.
    pub fn create(key: [u64; 2], rank: usize, ranks: usize) -> Result<Worker> {
        let ucx = library()?;
        let context = create_context(ucx, ranks)?;
        // SAFETY: all fields may be zero; the mask says which count.
        let params = ucp_worker_params_t {
            field_mask: UCP_WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode: UCS_THREAD_MODE_SERIALIZED,
            ..unsafe { std::mem::zeroed() }
        };
        let mut worker = std::ptr::null_mut();
        // SAFETY: a context, parameters, and a variable for the worker.
        let created = unsafe { (ucx.ucp_worker_create)(context, &raw const params, &raw mut worker) };
        if let Err(error) = check(ucx, created, "ucp_worker_create") {
            // SAFETY: a context without workers.
            unsafe { (ucx.ucp_cleanup)(context) };
            return Err(error);
        }
        let mail = Box::new(UnsafeCell::new(Mail::new(key)));
        let parts = Box::new(UnsafeCell::new(Parts::new(key)));
        let made = Worker {
            ucx,
            context,
            worker,
            peers: Vec::new(),
            operations: Vec::new(),
            free: Vec::new(),
            asides: Vec::new(),
            closing: Vec::new(),
            rank,
            warned: false,
            mail,
            parts,
            fetching: Vec::new(),
            replying: Vec::new(),
        };
        made.handle(MESSAGE, &made.mail)?;
        made.handle(ACCESS, &made.parts)?;
        Ok(made)
    }

    /// Has messages of a number handed to an inbox, which lives until the worker is destroyed.
    fn handle<I: Inbox>(&self, id: c_uint, inbox: &UnsafeCell<I>) -> Result<()> {
        let handler = ucp_am_handler_param_t {
            field_mask: UCP_AM_HANDLER_PARAM_FIELDS,
            id,
            flags: UCP_AM_FLAG_WHOLE_MSG,
            cb: Some(on_message::<I>),
            arg: inbox.get().cast(),
        };
        // SAFETY: a worker, and parameters that are copied.
        let set = unsafe { (self.ucx.ucp_worker_set_am_recv_handler)(self.worker, &raw const handler) };
        check(self.ucx, set, "ucp_worker_set_am_recv_handler")
    }

    /// Where peers find this worker.
    pub fn address(&self) -> Result<Vec<u8>> {
        // SAFETY: all fields may be zero.
        let mut attr: ucp_worker_attr_t = unsafe { std::mem::zeroed() };
        attr.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
        // SAFETY: a worker, and a structure for the answer.
        let asked = unsafe { (self.ucx.ucp_worker_query)(self.worker, &raw mut attr) };
        check(self.ucx, asked, "ucp_worker_query")?;
        // SAFETY: the answer has so many bytes, until it is released.
        unsafe {
            let address = std::slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length).to_vec();
            (self.ucx.ucp_worker_release_address)(self.worker, attr.address);
            Ok(address)
        }
    }

    /// Tells it the addresses of all ranks of the world.
    pub fn meet(&mut self, addresses: Vec<Vec<u8>>, key: [u64; 2]) {
        let peer = |address| Peer { address, endpoint: None, health: Box::default() };
        self.peers = addresses.into_iter().map(peer).collect();
        *self.mail.get_mut() = Mail::new(key);
        *self.parts.get_mut() = Parts::new(key);
    }

    /// Tells it the address of a rank, to which nothing was sent before.
    #[cfg(feature = "nccl")]
    pub fn introduce(&mut self, peer: usize, address: &[u8]) {
        self.peers[peer].address = address.to_vec();
    }

    /// The mail, for a moment in which UCX is not called.
    pub fn mail(&mut self) -> &mut Mail {
        self.mail.get_mut()
    }

    /// Drops what has come for a channel, and what still comes.
    pub fn close_channel(&mut self, channel: SegmentId) {
        self.mail.get_mut().close(channel);
        self.parts.get_mut().close_channel(channel);
        self.deliver();
    }

    /// How often the connection to a peer has broken.
    pub fn failures(&self, peer: usize) -> u64 {
        self.peers[peer].health.failures.load(Ordering::Relaxed)
    }

    /// UCX's text for the last failure of a peer's connection.
    pub fn last_failure(&self, peer: usize) -> String {
        self.ucx.describe(ucs_status_t(self.peers[peer].health.status.load(Ordering::Relaxed)))
    }

    /// Lets UCX work until it has nothing more to do, and starts what has become possible by that.
    pub fn progress(&mut self) {
        self.progress_rounds(ROUNDS_OF_PROGRESS);
    }

    /// [`progress`](Self::progress) for who looks again at once: whether there is more costs a call of the system, a tenth of a short
    /// message's time.
    pub fn progress_once(&mut self) {
        self.progress_rounds(1);
    }

    fn progress_rounds(&mut self, rounds: usize) {
        // SAFETY: no reference to the mail and to the parts lives.
        let advance = || unsafe { (self.ucx.ucp_worker_progress)(self.worker) } != 0;
        let _ = (0..rounds).take_while(|_| advance()).count();
        let mail = self.mail.get_mut();
        if !mail.deliveries.is_empty() || !mail.unwanted.is_empty() || !mail.dropped.is_empty() {
            self.deliver();
        }
        if self.is_serving() {
            self.serve();
        }
        if self.mail.get_mut().strangers + self.parts.get_mut().strangers > 0 && !self.warned {
            self.warned = true;
            crate::os::log::warn!(
                "a message that is not of this job's ranks has come to UCX's port: it does not count"
            );
        }
    }

    /// Carries out what the mail has decided.
    fn deliver(&mut self) {
        for (operation, header, delivery) in std::mem::take(&mut self.mail.get_mut().deliveries) {
            *self.operations[operation].header = header;
            self.operations[operation].state = match delivery {
                Delivery::Complete => State::Over(Outcome::Complete),
                Delivery::WrongLength => State::Over(Outcome::WrongLength),
                Delivery::Fetch(descriptor) => {
                    let Operation { target, len, .. } = self.operations[operation];
                    // SAFETY: room for the data until the request is over, says whoever posted the receive.
                    unsafe { self.fetch(descriptor, target, len) }
                }
                Delivery::FromAside(number) => State::Aside(number),
            };
        }
        for descriptor in std::mem::take(&mut self.mail.get_mut().unwanted) {
            // SAFETY: a descriptor that was kept and is not received.
            unsafe { (self.ucx.ucp_am_data_release)(self.worker, descriptor) };
        }
        for number in std::mem::take(&mut self.mail.get_mut().dropped) {
            self.drop_aside(number);
        }
    }

    /// # Safety
    /// `target` has room for `len` bytes until the request is over.
    unsafe fn fetch(&self, descriptor: *mut c_void, target: *mut u8, len: usize) -> State {
        let params = ucp_request_param_t::on_host(0);
        // SAFETY: a descriptor that was kept; the caller's contract.
        let answer = unsafe {
            (self.ucx.ucp_am_recv_data_nbx)(self.worker, descriptor, target.cast(), len, &raw const params)
        };
        state_of(answer)
    }

    /// The endpoint of a peer, made if there is none. `None` if UCX cannot make one: the peer's process may have ended.
    fn endpoint(&mut self, peer: usize) -> Option<ucp_ep_h> {
        if self.peers[peer].health.is_down.swap(false, Ordering::Relaxed) {
            self.close_endpoint(peer);
        }
        let Peer { address, endpoint, health } = &mut self.peers[peer];
        if endpoint.is_some() {
            return *endpoint;
        }
        // SAFETY: all fields may be zero; the mask says which count.
        let params = ucp_ep_params_t {
            field_mask: UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | UCP_EP_PARAM_FIELD_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: UCP_ERR_HANDLING_MODE_PEER,
            err_handler: ucp_err_handler_t { cb: Some(on_failure), arg: (&raw mut **health).cast() },
            ..unsafe { std::mem::zeroed() }
        };
        let mut made = std::ptr::null_mut();
        // SAFETY: a worker, parameters, and a variable for the endpoint; the health lives until the worker is destroyed.
        let created = unsafe { (self.ucx.ucp_ep_create)(self.worker, &raw const params, &raw mut made) };
        if created != ucs_status_t::Ok {
            health.fail(created);
            health.is_down.store(false, Ordering::Relaxed);
            return None;
        }
        *endpoint = Some(made);
        *endpoint
    }

    /// Breaks the connection to a peer. All requests on it end soon, also those of other communicators.
    pub fn disconnect(&mut self, peer: usize) {
        self.peers[peer].health.fail(ucs_status_t::Canceled);
        self.close_endpoint(peer);
    }

    fn close_endpoint(&mut self, peer: usize) {
        let Some(endpoint) = self.peers[peer].endpoint.take() else { return };
        self.close(endpoint, UCP_EP_CLOSE_FLAG_FORCE);
    }

    fn close(&mut self, endpoint: ucp_ep_h, flags: u32) {
        let params = ucp_request_param_t::on_host(flags);
        // SAFETY: an endpoint that nobody uses any more.
        let answer = unsafe { (self.ucx.ucp_ep_close_nbx)(endpoint, &raw const params) };
        if let Answer::Request(request) = Answer::of(answer) {
            self.closing.push(request);
        }
    }

    /// Adds an operation; the memory of an earlier one's header is used again.
    fn insert(
        &mut self,
        header: Header,
        from: (SegmentId, usize),
        peer: usize,
        buffer: (*mut u8, usize),
    ) -> usize {
        let (state, (target, len)) = (State::Waiting, buffer);
        if let Some(index) = self.free.pop() {
            let operation = &mut self.operations[index];
            *operation.header = header;
            (operation.state, operation.from, operation.peer) = (state, from, peer);
            (operation.target, operation.len) = buffer;
            return index;
        }
        let header = Box::new(header);
        self.operations.push(Operation { header, state, from, peer, target, len });
        self.operations.len() - 1
    }

    /// Starts to send a message to a world rank.
    ///
    /// # Safety
    /// As many bytes as the header says can be read at `data` until the operation is over.
    pub unsafe fn send(&mut self, peer: usize, header: Header, data: *const u8) -> usize {
        let (len, from, nowhere) = (header.bytes(), (header.channel, 0), (std::ptr::null_mut(), 0));
        if peer == self.rank {
            // SAFETY: the caller's contract.
            unsafe { self.mail.get_mut().take_eager(header, data, len) };
            let operation = self.insert(header, from, peer, nowhere);
            self.operations[operation].state = State::Over(Outcome::Complete);
            self.deliver();
            return operation;
        }
        let operation = self.insert(header, from, peer, nowhere);
        let header: *const Header = &raw const *self.operations[operation].header;
        let header = (header.cast::<c_void>(), size_of::<Header>());
        // SAFETY: the caller's contract; the header is kept with its operation.
        self.operations[operation].state = unsafe { self.start_send(peer, MESSAGE, header, (data, len), 0) };
        operation
    }

    /// Sends one of UCX's active messages to another world rank. `flags` are those of short ones.
    ///
    /// # Safety
    /// Header and data stay as they are until the request is over.
    unsafe fn start_send(
        &mut self,
        peer: usize,
        id: c_uint,
        (header, header_len): (*const c_void, usize),
        (data, len): (*const u8, usize),
        flags: u32,
    ) -> State {
        let Some(endpoint) = self.endpoint(peer) else { return State::Over(Outcome::Broken) };
        let params = ucp_request_param_t::on_host(if len >= FETCHED { UCP_AM_SEND_FLAG_RNDV } else { flags });
        // SAFETY: an endpoint; the caller's contract.
        let answer = unsafe {
            (self.ucx.ucp_am_send_nbx)(endpoint, id, header, header_len, data.cast(), len, &raw const params)
        };
        if let Answer::Error(status) = Answer::of(answer) {
            self.peers[peer].health.fail(status);
        }
        state_of(answer)
    }

    /// Posts a receive from `source`, a rank of the channel and world rank `peer`.
    ///
    /// # Safety
    /// `target` has room for `len` bytes, which nothing else touches, until the operation is over.
    pub unsafe fn receive(
        &mut self,
        channel: SegmentId,
        (source, peer): (usize, usize),
        matching: Matching,
        target: *mut u8,
        len: usize,
    ) -> usize {
        let operation = self.insert(Header::default(), (channel, source), peer, (target, len));
        let mail = self.mail.get_mut();
        mail.post(channel, source, Posted { operation, matching, target, len });
        if !mail.deliveries.is_empty() {
            self.deliver();
        }
        operation
    }

    /// How an operation ended, if it has, and the header that came (or went) with it.
    pub fn outcome(&mut self, operation: usize) -> Option<(Outcome, Header)> {
        let Operation { state, header, target, len, .. } = &mut self.operations[operation];
        if let State::Aside(number) = *state {
            let aside = self.asides[number].as_mut().expect("kept until its receive is over");
            let outcome = settled(self.ucx, &mut aside.state)?;
            if outcome == Outcome::Complete {
                // SAFETY: the receive's place has room for as many bytes, which nothing else touches.
                unsafe { std::ptr::copy_nonoverlapping(aside.bytes.as_ptr(), *target, *len) };
            }
            self.asides[number] = None;
            *state = State::Over(outcome);
        }
        settled(self.ucx, state).map(|outcome| (outcome, **header))
    }

    /// Forgets an operation that is over, or a receive whose message has not come. Otherwise answers its peer: UCX uses its buffer.
    pub fn forget(&mut self, operation: usize) -> std::result::Result<(), usize> {
        if self.outcome(operation).is_none() {
            let Operation { state, from, peer, .. } = self.operations[operation];
            match state {
                State::Waiting => self.mail.get_mut().withdraw(from.0, from.1, operation),
                State::Aside(number) => self.drop_aside(number),
                _ => return Err(peer),
            }
        }
        self.operations[operation].state = State::Free;
        self.free.push(operation);
        Ok(())
    }

    /// Whether UCX uses the operation's buffer.
    pub fn is_moving(&mut self, operation: usize) -> bool {
        let state = &mut self.operations[operation].state;
        matches!(state, State::Moving(_)) && settled(self.ucx, state).is_none()
    }

    /// Whether a receive waits for its message.
    pub fn is_waiting(&self, operation: usize) -> bool {
        self.operations[operation].state == State::Waiting
    }

    /// Starts to hand all that was sent to the network; `false` if that is done.
    pub fn flush(&mut self) -> Option<*mut c_void> {
        let params = ucp_request_param_t::on_host(0);
        // SAFETY: a worker.
        match Answer::of(unsafe { (self.ucx.ucp_worker_flush_nbx)(self.worker, &raw const params) }) {
            Answer::Request(request) => Some(request),
            Answer::Complete | Answer::Error(_) => None,
        }
    }

    /// Whether a request of [`flush`](Self::flush) is over; it is freed then.
    pub fn is_over(&self, request: *mut c_void) -> bool {
        // SAFETY: a request that is not freed.
        let is_over = unsafe { (self.ucx.ucp_request_check_status)(request) } != ucs_status_t::InProgress;
        if is_over {
            // SAFETY: as above; it is over.
            unsafe { (self.ucx.ucp_request_free)(request) };
        }
        is_over
    }

    /// Begins to close all connections: what was sent still goes.
    fn begin_to_close(&mut self) {
        for peer in 0..self.peers.len() {
            if let Some(endpoint) = self.peers[peer].endpoint.take() {
                let flags = match self.peers[peer].health.is_down.load(Ordering::Relaxed) {
                    true => UCP_EP_CLOSE_FLAG_FORCE,
                    false => 0,
                };
                self.close(endpoint, flags);
            }
        }
    }

    /// Whether all connections that were to be closed are closed.
    fn is_closed(&mut self) -> bool {
        let closing = std::mem::take(&mut self.closing);
        self.closing = closing.into_iter().filter(|request| !self.is_over(*request)).collect();
        self.closing.is_empty()
    }

    /// Closes all connections and gives everything back to UCX. False if that takes too long: what UCX still uses stays until the process ends.
    pub fn end(mut self) -> bool {
        let since = RunInstant::now();
        self.begin_to_close();
        while !self.is_closed() {
            self.progress();
            if since.elapsed() > CLOSING {
                crate::os::log::debug!("UCX's connections did not close in time");
                std::mem::forget(self);
                return false;
            }
            std::thread::yield_now();
        }
        self.destroy();
        true
    }

    fn destroy(self) {
        // SAFETY: nothing of this worker and context is used any more; the mail lives until it is destroyed.
        unsafe {
            (self.ucx.ucp_worker_destroy)(self.worker);
            (self.ucx.ucp_cleanup)(self.context);
        }
    }
}

/// How it ended, if it has. A request that is over is freed.
fn settled(ucx: &Ucx, state: &mut State) -> Option<Outcome> {
    if let State::Moving(request) = *state {
        // SAFETY: a request that is not freed.
        let status = unsafe { (ucx.ucp_request_check_status)(request) };
        if status == ucs_status_t::InProgress {
            return None;
        }
        // SAFETY: as above; it is over.
        unsafe { (ucx.ucp_request_free)(request) };
        *state = State::Over(if status == ucs_status_t::Ok { Outcome::Complete } else { Outcome::Broken });
    }
    match *state {
        State::Over(outcome) => Some(outcome),
        State::Waiting | State::Moving(_) | State::Aside(_) => None,
        State::Free => unreachable!("an operation is asked for until it is forgotten"),
    }
}

fn state_of(answer: ucs_status_ptr_t) -> State {
    match Answer::of(answer) {
        Answer::Complete => State::Over(Outcome::Complete),
        Answer::Request(request) => State::Moving(request),
        Answer::Error(_) => State::Over(Outcome::Broken),
    }
}

/// A message has come.
unsafe extern "C" fn on_message<I: Inbox>(
    inbox: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: the inbox of this worker; UCX runs inside of one of its calls, where no other reference lives. The parameters and
    // so many bytes of header can be read; any bytes are a header.
    unsafe {
        let inbox = &mut *inbox.cast::<I>();
        if header_len != size_of::<I::Header>() {
            inbox.count_stranger();
            return ucs_status_t::Ok;
        }
        let header = header.cast::<I::Header>().read_unaligned();
        if (*param).recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV != 0 {
            let is_kept = inbox.take_rendezvous(header, data, len);
            return if is_kept { ucs_status_t::InProgress } else { ucs_status_t::Ok };
        }
        inbox.take_eager(header, data.cast_const().cast(), len);
        ucs_status_t::Ok
    }
}

/// A peer's endpoint has failed.
unsafe extern "C" fn on_failure(health: *mut c_void, _endpoint: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the health of a peer, which lives as long as the worker.
    unsafe { &*health.cast::<Health>() }.fail(status);
}
