"""The GraphQL schema, in GraphQL's own language.

Names are those that clients of Workers AI use; what is about cached tokens, amounts, sessions, API tokens,
statuses and quantiles extends them.
"""

from __future__ import annotations

SCHEMA = """
"A day, as in 2026-11-30."
scalar Date
"An instant, as in 2026-11-30T12:00:00Z."
scalar Time
"A whole number that may exceed 32 bits."
scalar uint64

type Query {
  viewer: Viewer!
}

type Viewer {
  accounts(filter: AccountFilter, limit: Int): [Account!]!
}

input AccountFilter {
  "The account that the API token belongs to, which is also the default; any for an operator."
  accountTag: String
}

type Account {
  "Sums over inference requests, per combination of the dimensions that are selected."
  aiInferenceAdaptiveGroups(
    limit: Int!, filter: AiInferenceFilter, orderBy: [AiInferenceGroupsOrder!]
  ): [AiInferenceGroup!]!
  "Single inference requests."
  aiInferenceAdaptive(
    limit: Int!, filter: AiInferenceFilter, orderBy: [AiInferenceOrder!]
  ): [AiInference!]!
}

"All conditions hold together. Groups are kept by the quarter-hour: a time within one stands for all of it."
input AiInferenceFilter {
  date: Date
  date_geq: Date
  date_gt: Date
  date_leq: Date
  date_lt: Date
  datetime_geq: Time
  datetime_gt: Time
  datetime_leq: Time
  datetime_lt: Time
  datetimeHour_geq: Time
  datetimeHour_leq: Time
  datetimeHour_lt: Time
  datetimeFifteenMinutes_geq: Time
  datetimeFifteenMinutes_leq: Time
  datetimeFifteenMinutes_lt: Time
  modelId: String
  modelId_in: [String!]
  requestSource: String
  sessionId: String
  sessionId_in: [String!]
  tokenId: String
  status: String
  "Only requests of at least so many neurons."
  neurons_geq: Float
  "Only requests of at least so many input tokens."
  costMetricValue1_geq: Float
}

enum AiInferenceGroupsOrder {
  date_ASC
  date_DESC
  datetimeHour_ASC
  datetimeHour_DESC
  datetimeFifteenMinutes_ASC
  datetimeFifteenMinutes_DESC
  modelId_ASC
  modelId_DESC
  count_ASC
  count_DESC
  sum_totalNeurons_ASC
  sum_totalNeurons_DESC
  sum_totalInputTokens_ASC
  sum_totalInputTokens_DESC
  sum_totalOutputTokens_ASC
  sum_totalOutputTokens_DESC
}

enum AiInferenceOrder {
  datetime_ASC
  datetime_DESC
}

type AiInferenceGroup {
  count: uint64!
  sum: AiInferenceSum!
  dimensions: AiInferenceDimensions!
  "Where they are kept: not by session, status or source, nor filtered by these or by a request's size."
  quantiles: AiInferenceQuantiles
}

type AiInferenceSum {
  totalNeurons: Float!
  totalInputTokens: uint64!
  totalCachedInputTokens: uint64!
  totalOutputTokens: uint64!
  totalInferenceTimeMs: Float!
  totalAudioSeconds: Float!
  "Input tokens."
  totalCostMetricValue1: Float!
  "Output tokens."
  totalCostMetricValue2: Float!
  "Billions of the currency's unit."
  totalAmountNanos: uint64!
  "What the same would have cost without the discount for cached tokens."
  totalUndiscountedNanos: uint64!
}

type AiInferenceDimensions {
  date: Date!
  datetimeHour: Time!
  datetimeFifteenMinutes: Time!
  modelId: String!
  requestSource: String!
  sessionId: String!
  tokenId: String!
  status: String!
  costMetricName1: String!
  costMetricName2: String!
}

type AiInferenceQuantiles {
  ttftMsP50: Float
  ttftMsP90: Float
  ttftMsP99: Float
  "Tokens a second after the first; p90 is what 90 % of the requests reach."
  tokensPerSecondP50: Float
  tokensPerSecondP90: Float
  tokensPerSecondP99: Float
}

type AiInference {
  requestId: String!
  datetime: Time!
  modelId: String!
  requestSource: String!
  neurons: Float!
  inputTokens: uint64!
  cachedInputTokens: uint64!
  outputTokens: uint64!
  inferenceTimeMs: Float!
  ttftMs: Float
  "0 when all went well."
  errorCode: Int!
  sampleInterval: Int!
  sessionId: String!
  tokenId: String!
  status: String!
  amountNanos: uint64!
}
"""
