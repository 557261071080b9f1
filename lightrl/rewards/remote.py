"""Rewards that a server computes: any HTTP endpoint, or a judge behind an OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

_TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds
_CONNECTIONS = 256

JUDGE_PROMPT = """You grade an answer to a question.

Question:
{question}

Reference answer:
{ground_truth}

Answer to grade:
{completion}

Say in one sentence what is right or wrong with it, then write "Score: N" on a line of its own, N from 0 (wrong) to 10
(right and complete)."""


class HTTPReward:
    """Posts each completion to a server as JSON and takes the number that comes back.

    It sends ``{"completion": ..., "ground_truth": ...}`` and the columns asked for, and expects ``{"score": number}``.
    Connection errors and the statuses 408, 429 and 5xx are tried again after growing pauses.

    Args:
        url: where to post to.
        columns: further columns to send.
        timeout: seconds for all tries together. Let it be below the datamodule's ``reward_timeout``.
        retries: tries after the first.
        api_key_env: environment variable with a key to send as bearer token; None for none.

    Raises:
        ValueError: the URL is not http(s) or holds a password, or a number is out of range.
    """

    def __init__(
        self,
        url: str,
        columns: Sequence[str] = (),
        timeout: float = 30.0,
        retries: int = 3,
        api_key_env: str | None = None,
    ) -> None:
        self.columns = tuple(columns)
        self._poster = JSONPoster(url, timeout, retries, api_key_env)

    async def __call__(self, completion: str, ground_truth: Any, **columns: Any) -> float:
        """Return the server's score."""
        missing = [name for name in self.columns if name not in columns]
        if missing:
            raise ValueError(f"there is no column {missing[0]!r} to send. There are: {sorted(columns)}")
        sent = {name: columns[name] for name in self.columns}
        reply = await self._poster.post({"completion": completion, "ground_truth": ground_truth, **sent})
        score = reply.get("score") if isinstance(reply, Mapping) else None
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f'{self._poster.url} replied {str(reply)[:200]}: wanted {{"score": number}}')
        return float(score)

    async def aclose(self) -> None:
        """Close the connections; a later call opens new ones."""
        await self._poster.aclose()


class Judge:
    """Asks a language model behind an OpenAI-compatible endpoint to grade each completion.

    Args:
        model: its name at the endpoint.
        base_url: up to and without ``/chat/completions``.
        prompt: what the judge is asked; ``{question}``, ``{completion}`` and ``{ground_truth}`` are filled in.
        score: regular expression whose last match in the reply has the score as its first group.
        scale: the best score; rewards are score / scale.
        timeout: seconds for all tries together. Let it be below the datamodule's ``reward_timeout``.
        retries: tries after the first.
        api_key_env: environment variable that holds the key: it is read for each request and kept nowhere. A variable
            that is not set means a server without keys.
        options: further fields of the request, such as ``{"temperature": 0}``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        base_url: str = "https://api.openai.com/v1",
        prompt: str = JUDGE_PROMPT,
        score: str = r"(?i)score[^\w+-]{0,4}([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)",
        scale: float = 10.0,
        timeout: float = 60.0,
        retries: int = 3,
        api_key_env: str = "OPENAI_API_KEY",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if "{completion}" not in prompt:
            raise ValueError("prompt has no {completion}: the judge would not see what it grades")
        if re.compile(score).groups < 1:
            raise ValueError(f"score={score!r} has no group: put the number in parentheses")
        if not scale > 0:
            raise ValueError(f"scale={scale}: must be more than 0")
        self.model, self.prompt, self.score, self.scale = model, prompt, re.compile(score), scale
        self.options = dict(options or {})
        self._poster = JSONPoster(f"{base_url.rstrip('/')}/chat/completions", timeout, retries, api_key_env)

    async def __call__(self, completion: str, ground_truth: Any, prompt: Any) -> float:
        """Return the grade, from 0 to 1."""
        question = prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)
        filled = {"question": question, "ground_truth": str(ground_truth), "completion": completion}
        asked = re.sub(r"\{(question|ground_truth|completion)\}", lambda m: filled[m.group(1)], self.prompt)
        messages = [{"role": "user", "content": asked}]
        reply = await self._poster.post({"model": self.model, "messages": messages, **self.options})
        try:
            said = str(reply["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self._poster.url} sent no chat completion: {str(reply)[:200]}") from error
        found = self.score.findall(said)
        grade = float(found[-1] if isinstance(found[-1], str) else found[-1][0]) / self.scale if found else None
        if grade is None or not 0 <= grade <= 1:
            raise ValueError(f"the judge {self.model!r} gave no score from 0 to {self.scale:g}: {said[-200:]!r}")
        return grade

    async def aclose(self) -> None:
        """Close the connections; a later call opens new ones."""
        await self._poster.aclose()


class JSONPoster:
    """Posts JSON, with retries and a deadline over all of them, and keeps connections open between calls.

    Args:
        url: where to.
        timeout: seconds for all tries together.
        retries: tries after the first.
        api_key_env: environment variable with the bearer token, or None.
    """

    def __init__(self, url: str, timeout: float, retries: int, api_key_env: str | None) -> None:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"the URL for {parts.hostname} holds a user or password: name api_key_env= instead")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url={url!r}: must begin with http:// or https:// and a host")
        if not timeout > 0 or retries < 0:
            raise ValueError(f"timeout={timeout} must be more than 0, retries={retries} must be 0 or more")
        self.url, self.timeout, self.retries, self.api_key_env = url, timeout, retries, api_key_env
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, payload: Any) -> Any:
        """Return the reply's JSON.

        Raises:
            RuntimeError: the server refused, replied no JSON, or no try succeeded in time; it says what the last one
                met.
        """
        failed, headers = "no reply yet", self._headers()
        try:
            async with asyncio.timeout(self.timeout):
                for attempt in range(self.retries + 1):
                    if attempt:
                        await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)))
                    try:
                        reply = await self._open().post(self.url, json=payload, headers=headers)
                    except httpx.TransportError as error:
                        failed = f"{type(error).__name__}: {error}"
                        continue
                    if reply.is_success:
                        return self._read(reply)
                    failed = f"status {reply.status_code}: {self._without_key(reply.text)[:200]}"
                    if reply.status_code not in _TRY_AGAIN:
                        raise RuntimeError(f"{self.url}: {failed}")
        except TimeoutError as error:
            raise RuntimeError(f"{self.url} gave nothing within {self.timeout:g} s; the last try: {failed}") from error
        raise RuntimeError(f"{self.url}: {self.retries + 1} tries failed, the last with {failed}")

    def _read(self, reply: httpx.Response) -> Any:
        try:
            return reply.json()
        except ValueError as error:
            said = self._without_key(reply.text)[:200]
            raise RuntimeError(f"{self.url} replied what is no JSON ({error}): {said!r}") from error

    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""

    def _headers(self) -> dict[str, str]:
        key = self._key()
        if not (key.isascii() and key.isprintable()):  # whoever encodes it would show it in his error
            raise RuntimeError(f"the key in {self.api_key_env} holds characters that no header may have: set it again")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _without_key(self, text: str) -> str:
        key = self._key()
        return text.replace(key, "***") if key else text

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # connections belong to a loop
            limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
            self._client, self._loop = httpx.AsyncClient(timeout=None, limits=limits), loop
        return self._client

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
